// GradScaler in training loops: a scaled model against the same model without scaling, through one overflow.
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <memory>

#include "allfinite/amp/autocast_guard.h"
#include "allfinite/amp/grad_scaler.h"
#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using namespace allfinite::test;

constexpr int kBatches = 4;
constexpr int kSkip = 2;  // the iteration with the overflow

struct Model {
  std::vector<Tensor> weights;
  Tensor loss(int batch) const {
    const Tensor input = at::full({8, 8}, 0.1 + 0.05 * batch) + at::arange(8) * 0.01;
    return at::mse_loss(at::mm(at::mm(input, weights[0]), weights[1]), at::ones({8, 8}) * batch * 0.1);
  }
};

Model model() {
  at::manual_seed(0);
  return {{(at::randn({8, 8}) * 0.1).requires_grad_(), (at::randn({8, 8}) * 0.1).requires_grad_()}};
}

using Iteration = std::function<void(GradScaler&, Model&, torch::optim::Optimizer&, int batch)>;

// Trains a model with an enabled scaler and one with a disabled one; both leave out the step of batch kSkip. The two
// must agree, and the scale must have moved once for each update.
void compare_with_unscaled(const Iteration& iteration, double growths = 3, double tolerance = 1e-5) {
  std::vector<Model> trained;
  for (bool enabled : {true, false}) {
    trained.push_back(model());
    Model& m = trained.back();
    GradScaler scaler(cpu_options(128).growth_interval(1).enabled(enabled));
    auto optimizer = sgd(m.weights, 0.5);
    for (int batch = 0; batch < kBatches; ++batch) {
      optimizer.zero_grad();
      iteration(scaler, m, optimizer, batch);
    }
    CHECK(scaler.get_scale() == (enabled ? 128 * std::pow(2, growths) * 0.5 : 1));
  }
  for (size_t i = 0; i < 2; ++i) {
    // Scaling by powers of two is exact: what is left is the rounding of the loss and of clipping.
    CHECK(at::allclose(trained[0].weights[i], trained[1].weights[i], tolerance, 1e-7));
    CHECK_FALSE(at::allclose(trained[0].weights[i], model().weights[i], 1e-3));
  }
}

void overflow(const GradScaler& scaler, const Model& m, int batch) {
  if (batch == kSkip && scaler.is_enabled()) {
    m.weights[0].mutable_grad().fill_(kInf);
  }
}

void step(GradScaler& scaler, torch::optim::Optimizer& optimizer, int batch) {
  if (scaler.is_enabled() || batch != kSkip) {
    const auto result = scaler.step(optimizer);
    CHECK((result.status == StepStatus::Skipped) == (scaler.is_enabled() && batch == kSkip));
  }
  scaler.update();
}

TEST_CASE("GradScaler trains: scaled and unscaled agree through an overflow") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    scaler.scale(m.loss(batch)).backward();
    overflow(scaler, m, batch);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: scaled gradients clipped to a scaled norm, as torch's own function does it") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    scaler.scale(m.loss(batch)).backward();
    torch::nn::utils::clip_grad_norm_(m.weights, 0.2 * scaler.get_scale());
    overflow(scaler, m, batch);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: unscale_, then torch's clip") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    scaler.scale(m.loss(batch)).backward();
    overflow(scaler, m, batch);
    scaler.unscale_(optimizer);
    torch::nn::utils::clip_grad_norm_(m.weights, 0.2);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: its own clip") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    scaler.scale(m.loss(batch)).backward();
    overflow(scaler, m, batch);
    scaler.clip_grad_norm_(optimizer, 0.2);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: a gradient penalty, with the scale divided out of the graph") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    const auto grads = torch::autograd::grad({scaler.scale(m.loss(batch))}, m.weights, {}, true, true);
    Tensor norm = at::zeros({});
    for (const auto& g : grads) {
      norm = norm + (g * (1 / scaler.get_scale())).pow(2).sum();
    }
    scaler.scale(m.loss(batch) + norm.sqrt()).backward();
    overflow(scaler, m, batch);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: two backwards for one step, one scale for both") {
  compare_with_unscaled([](GradScaler& scaler, Model& m, torch::optim::Optimizer& optimizer, int batch) {
    scaler.scale(m.loss(batch) / 2).backward();
    scaler.scale(m.loss(batch + 1) / 2).backward();
    overflow(scaler, m, batch);
    step(scaler, optimizer, batch);
  });
}

TEST_CASE("GradScaler trains: two models, two losses, the overflow in one of them") {
  Model a = model(), b = model();
  GradScaler scaler(cpu_options(128).growth_interval(1));
  auto first = sgd(a.weights, 0.5), second = sgd(b.weights, 0.5);
  for (int batch = 0; batch < kBatches; ++batch) {
    first.zero_grad();
    second.zero_grad();
    scaler.scale(a.loss(batch) + b.loss(batch)).backward({}, /*retain_graph=*/true);
    scaler.scale(a.loss(batch) * 0.5).backward();
    overflow(scaler, b, batch);
    scaler.unscale_(first);
    CHECK(scaler.step(first).status == StepStatus::Stepped);
    CHECK((scaler.step(second).status == StepStatus::Skipped) == (batch == kSkip));
    scaler.update();
  }
  CHECK(scaler.get_scale() == 128 * 8 * 0.5);
}

TEST_CASE("GradScaler trains: autocast and scaling stay close to fp32, through a save and load in every iteration") {
  for (bool adam : {false, true}) {
    Model scaled = model(), control = model();
    const auto optimizer_for = [&](Model& m) -> std::unique_ptr<torch::optim::Optimizer> {
      if (adam) {
        return std::make_unique<torch::optim::AdamW>(m.weights, torch::optim::AdamWOptions(1e-3));
      }
      return std::make_unique<torch::optim::SGD>(m.weights, torch::optim::SGDOptions(0.1));
    };
    auto optimizer = optimizer_for(scaled), plain = optimizer_for(control);
    GradScaler scaler(cpu_options(128));
    for (int batch = 0; batch < kBatches; ++batch) {
      GradScaler again(cpu_options());
      again.load_state(scaler.state());
      scaler = std::move(again);
      optimizer->zero_grad();
      plain->zero_grad();
      Tensor loss;
      {
        AutocastGuard guard(at::kCPU, at::kHalf);
        loss = scaled.loss(batch);
      }
      scaler.scale(loss).backward();
      scaler.step(*optimizer);
      scaler.update();
      control.loss(batch).backward();
      plain->step();
    }
    CHECK(scaler.get_scale() == 128);
    CHECK(scaler.get_growth_tracker() == kBatches);
    // fp16 keeps 11 bits of products near 0.1; Adam turns the sign of a tiny gradient into a whole step of 1e-3.
    CHECK(at::allclose(scaled.weights[0], control.weights[0], 0, adam ? 2 * kBatches * 1e-3 : 1e-3));
  }
}

TEST_CASE(
    "GradScaler trains in bf16: with powers of two the gradients are those of an unscaled run, bit for bit (N42)") {
  Model scaled = model(), plain = model();
  GradScaler scaler(cpu_options());
  auto optimizer = sgd(scaled.weights);
  const auto backward = [](const Model& m, const std::function<Tensor(Tensor)>& scale) {
    Tensor loss;
    {
      AutocastGuard guard(at::kCPU, at::kBFloat16);
      loss = m.loss(1);
    }
    scale(loss).backward();
  };
  backward(scaled, [&](const Tensor& loss) { return scaler.scale(loss); });
  backward(plain, [](const Tensor& loss) { return loss; });
  scaler.unscale_(optimizer);
  for (size_t i = 0; i < 2; ++i) {
    CHECK(at::equal(scaled.weights[i].grad(), plain.weights[i].grad()));
  }
}

// --- clipping --------------------------------------------------------------------------------------------------------

TEST_CASE("GradScaler::clip_grad_norm_: scaled gradients are unscaled first (N10)") {
  for (bool unscaled : {false, true}) {
    GradScaler scaler = used_scaler();
    const Tensor p = parameter(values({3, 4}) * 65536);
    auto optimizer = sgd({p});
    if (unscaled) {
      scaler.unscale_(optimizer);
    }
    const Tensor norm = scaler.clip_grad_norm_(optimizer, 1.0);
    CHECK(norm.scalar_type() == at::kDouble);
    CHECK(norm.item<double>() == 5);
    CHECK(at::allclose(p.grad(), values({0.6, 0.8}), 1e-6));  // torch's formula adds 1e-6 to the norm
    CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
  }
}

TEST_CASE("GradScaler::clip_grad_norm_: gradients whose squares overflow are clipped, not zeroed (N11)") {
  GradScaler scaler = used_scaler(1);
  const Tensor p = parameter(values({1e20, 1e20})), q = parameter(values({1e300, 0}, at::kDouble));
  auto optimizer = sgd({p}), fp64 = sgd({q});
  scaler.clip_grad_norm_(optimizer, 1.0);
  CHECK(at::allclose(p.grad(), values({0.70710678, 0.70710678}), 1e-6));
  CHECK(scaler.clip_grad_norm_(fp64, 1.0).item<double>() == 1e300);
  CHECK(at::allclose(q.grad(), values({1, 0}, at::kDouble), 1e-12));
}

TEST_CASE(
    "GradScaler::clip_grad_norm_: a norm that is not finite changes nothing, and the skip names the parameter (N30)") {
  GradScaler scaler = used_scaler(2);
  const Tensor good = parameter(values({8})), bad = parameter(values({kInf, 4}));
  auto optimizer = sgd({good, bad});
  CHECK(scaler.clip_grad_norm_(optimizer, 1.0).item<double>() == kInf);
  CHECK(good.grad().item<float>() == 4);
  CHECK(at::equal(bad.grad(), values({kInf, 2})));
  const StepResult result = scaler.step(optimizer);
  CHECK(result.status == StepStatus::Skipped);
  CHECK(result.reason == SkipReason::Inf);
  CHECK(result.param_index == 1);
  CHECK(result.amax == 2);
}

TEST_CASE("GradScaler::clip_grad_norm_: small norms, no gradients, and norms over groups and dtypes") {
  GradScaler scaler = used_scaler(1);
  const Tensor a = parameter(values({3})), b = parameter(values({4}, at::kHalf)),
               c = parameter(values({12}, at::kDouble));
  auto optimizer = sgd_groups({{a}, {b, c}}), empty = sgd({at::zeros({1}).requires_grad_()});
  CHECK(scaler.clip_grad_norm_(optimizer, 100).item<double>() == 13);
  CHECK(a.grad().item<float>() == 3);
  CHECK(scaler.clip_grad_norm_(optimizer, 6.5).item<double>() == 13);
  CHECK(std::abs(c.grad().item<double>() - 6) < 1e-5);
  CHECK(std::abs(b.grad().item<double>() - 2) < 1e-3);
  CHECK(scaler.clip_grad_norm_(empty, 1).item<double>() == 0);
  CHECK(scaler.clip_grad_norm_(optimizer, kInf).item<double>() < 6.51);
  CHECK(error_of<c10::ValueError>([&] { scaler.clip_grad_norm_(optimizer, -1); }) ==
        "allfinite::GradScaler::clip_grad_norm_: expected max_norm >= 0, but got -1");
  CHECK(error_of<c10::ValueError>([&] { scaler.clip_grad_norm_(optimizer, kNaN); }) != "no error");
}

TEST_CASE("GradScaler::clip_grad_norm_: shared memory is clipped once, in every dtype (N49)") {
  for (auto dtype : {at::kFloat, at::kDouble}) {
    GradScaler scaler = used_scaler(1);
    const Tensor gradient = values({3}, dtype);
    auto optimizer = sgd({parameter(gradient), parameter(gradient)});
    const double norm = scaler.clip_grad_norm_(optimizer, 1).item<double>();
    CHECK(gradient.item<double>() == Approx(3 / norm).epsilon(1e-5));
  }
}

}  // namespace
}  // namespace allfinite::amp
