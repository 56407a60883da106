// A C++ trainer as a user would write it: a Transformer learns to reverse a sequence in 16 bits on the CPU.
//
//   trainer bf16|fp16 STEPS [--inject STEP] [--save DIR] [--resume DIR]
//
// --inject puts an infinity into a gradient of that step. --save and --resume keep model, optimizer and scaler. Prints
// one "key value" a line; the caller judges.
#include <allfinite/allfinite.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model.h"

namespace {

constexpr int64_t kVocabulary = 8, kLength = 8, kDim = 64, kHeads = 4, kBatch = 32;
constexpr int64_t kAveraged = 20;  // the last losses that are reported as one

// Weights decay, norms, biases and positions do not: two groups.
torch::optim::AdamW make_optimizer(const Transformer& model) {
  std::vector<torch::Tensor> decayed, plain;
  for (const auto& item : model->named_parameters()) {
    (item.value().dim() == 2 && item.key() != "positions" ? decayed : plain).push_back(item.value());
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<torch::optim::AdamWOptions>(3e-3));
  groups.emplace_back(plain,
                      std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(3e-3).weight_decay(0)));
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(3e-3));
}

// FNV-1a over the bits of all parameters.
uint64_t hash_of(const Transformer& model) {
  uint64_t hash = 14695981039346656037u;
  for (const auto& parameter : model->parameters()) {
    const auto bytes = parameter.detach().contiguous().view(-1).view(torch::kByte);
    for (int64_t i = 0; i < bytes.numel(); ++i) {
      hash = (hash ^ bytes.const_data_ptr<uint8_t>()[i]) * 1099511628211u;
    }
  }
  return hash;
}

class Trainer {
 public:
  explicit Trainer(torch::Dtype dtype)
      : dtype_(dtype),
        model_(kVocabulary, kLength, kDim, kHeads),
        optimizer_(make_optimizer(model_)),
        scaler_(allfinite::amp::GradScalerOptions().device(torch::kCPU).growth_interval(20)) {
    scaler_.name_parameters(model_->named_parameters());
  }

  // The batch depends on the step alone, so that a run that resumes sees what the other run saw.
  allfinite::amp::StepResult step(int64_t number, bool inject) {
    torch::manual_seed(1000 + number);
    const auto input = torch::randint(kVocabulary, {kBatch, kLength});
    optimizer_.zero_grad();
    torch::Tensor loss;
    {
      allfinite::amp::AutocastGuard guard(torch::kCPU, dtype_);
      const auto logits = model_->forward(input).to(torch::kFloat);
      loss = torch::cross_entropy_loss(logits.flatten(0, 1), input.flip(1).flatten());
    }
    scaler_.scale(loss).backward();
    if (inject) {
      model_->block->proj->bias.mutable_grad()[0] = std::numeric_limits<float>::infinity();
    }
    scaler_.clip_grad_norm_(optimizer_, 1.0);
    auto result = scaler_.step(optimizer_);
    scaler_.update();
    last_loss_ = loss.item<double>();
    return result;
  }

  void save(const std::string& directory) const {
    torch::save(model_, directory + "/model.pt");
    torch::save(optimizer_, directory + "/optimizer.pt");
    torch::save(scaler_, directory + "/scaler.pt");
  }

  void load(const std::string& directory) {
    torch::load(model_, directory + "/model.pt");
    torch::load(optimizer_, directory + "/optimizer.pt");
    torch::load(scaler_, directory + "/scaler.pt");
  }

  uint64_t hash() const { return hash_of(model_); }
  double last_loss() const { return last_loss_; }
  const allfinite::amp::GradScaler& scaler() const { return scaler_; }

 private:
  torch::Dtype dtype_;
  Transformer model_;
  torch::optim::AdamW optimizer_;
  allfinite::amp::GradScaler scaler_;
  double last_loss_ = 0;
};

void run(torch::Dtype dtype, int64_t steps, std::map<std::string, std::string> options) {
  torch::manual_seed(0);
  Trainer trainer(dtype);
  const int64_t inject = options.count("--inject") ? std::stoll(options["--inject"]) : -1;
  int64_t first = 0;
  if (options.count("--resume")) {
    trainer.load(options["--resume"]);
    first = steps / 2;
  }
  const int64_t last = options.count("--save") ? steps / 2 : steps;
  double sum = 0;
  int64_t skipped = 0;
  for (int64_t number = first; number < last; ++number) {
    const auto hash_before = number == inject ? trainer.hash() : 0;
    const auto scale_before = trainer.scaler().get_scale();
    const auto result = trainer.step(number, number == inject);
    if (number == inject) {
      std::cout << "injected " << result << "\nparameters " << (trainer.hash() == hash_before ? "kept" : "changed")
                << "\nbackoff " << trainer.scaler().get_scale() / scale_before << "\n";
    }
    skipped += result.status == allfinite::amp::StepStatus::Skipped;
    sum += number >= last - kAveraged ? trainer.last_loss() : 0;
  }
  if (options.count("--save")) {
    trainer.save(options["--save"]);
  }
  std::cout << "loss " << sum / kAveraged << "\nskipped " << skipped << "\nscale " << trainer.scaler().get_scale()
            << "\ntracker " << trainer.scaler().get_growth_tracker() << "\nhash " << trainer.hash() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0) {
    std::cerr << "usage: trainer bf16|fp16 STEPS [--inject STEP] [--save DIR] [--resume DIR]\n";
    return 2;
  }
  std::map<std::string, std::string> options;
  for (int i = 3; i + 1 < argc; i += 2) {
    options[argv[i]] = argv[i + 1];
  }
  run(std::strcmp(argv[1], "bf16") == 0 ? torch::kBFloat16 : torch::kHalf, std::stoll(argv[2]), options);
}
