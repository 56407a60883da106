// GradScaler: what step does with gradients of every kind, and what it says about a skip.
#include <torch/optim/adagrad.h>

#include <cmath>
#include <sstream>

#include "allfinite/amp/grad_scaler.h"
#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using namespace allfinite::test;

constexpr double kHalfMax = 65504;

std::string text_of(const StepResult& result) {
  std::ostringstream text;
  text << result;
  return text.str();
}

// --- the result ------------------------------------------------------------------------------------------------------

TEST_CASE("StepResult: a step that was made") {
  GradScaler scaler = used_scaler(4);
  const Tensor p = parameter(values({8}));
  auto optimizer = sgd({p});
  const StepResult result = scaler.step(optimizer);
  CHECK(result.status == StepStatus::Stepped);
  CHECK(result.reason == SkipReason::None);
  CHECK(result.param_group == -1);
  CHECK(result.scale == 4);
  CHECK_FALSE(result.at_floor);
  CHECK(p.item<float>() == -2);
  CHECK(text_of(result) == "stepped");
}

TEST_CASE("StepResult: the first offending parameter in the order of the groups, and why (N4)") {
  GradScaler scaler = used_scaler(4);
  const Tensor good = parameter(values({8})), nan = parameter(values({1, kNaN, kInf, -20})),
               inf = parameter(values({kInf}));
  auto optimizer = sgd_groups({{good}, {good.detach().clone(), nan, inf}});
  torch::OrderedDict<std::string, Tensor> names;
  names.insert("head.bias", nan);
  scaler.name_parameters(names);
  const StepResult result = scaler.step(optimizer);
  CHECK(result.status == StepStatus::Skipped);
  CHECK(result.reason == SkipReason::NaN);
  CHECK(result.param_group == 1);
  CHECK(result.param_index == 1);
  CHECK(result.param_name == "head.bias");
  CHECK(result.amax == 5);
  CHECK(result.scale == 4);
  CHECK(good.item<float>() == 0);
  CHECK(text_of(result) == "skipped: nan in the gradient of parameter group 1, index 1 (head.bias), at scale 4");
}

TEST_CASE("StepResult: a gradient that division takes beyond its dtype is named as such (N1c)") {
  Warnings at_the_floor;
  for (double floor : {0.25, 1.0}) {
    GradScaler scaler = used_scaler(cpu_options(0.5).min_scale(floor));
    const Tensor p = parameter(values({60000}, at::kHalf));
    auto optimizer = sgd({p});
    const StepResult result = scaler.step(optimizer);
    CHECK(result.status == StepStatus::Skipped);
    CHECK(result.reason == SkipReason::AfterUnscale);
    CHECK(p.item<float>() == 0);
  }
  GradScaler scaler = used_scaler(cpu_options(0.5));
  auto optimizer = sgd({parameter(values({kInf}, at::kHalf))});
  CHECK(scaler.step(optimizer).reason == SkipReason::Inf);
}

TEST_CASE("StepResult: a skip at the floor says so, and warns once, naming min_scale") {
  GradScaler scaler = used_scaler(2);
  auto optimizer = sgd({parameter(values({kInf}))});
  Warnings warnings;
  std::vector<bool> at_floor;
  for (int i = 0; i < 4; ++i) {
    at_floor.push_back(scaler.step(optimizer).at_floor);
    scaler.update();
  }
  CHECK(at_floor == std::vector<bool>{false, true, true, true});
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0].find("skipped: inf in the gradient of parameter group 0, index 0, at scale 1") !=
        std::string::npos);
  CHECK(warnings.texts[0].find("min_scale = 1") != std::string::npos);
}

TEST_CASE("StepResult: without any gradient nothing happens, in step and in update (N24)") {
  GradScaler scaler = used_scaler(cpu_options(4).growth_interval(1));
  const Tensor p = at::ones({1}).requires_grad_();
  auto optimizer = sgd({p}), empty = sgd({at::ones({1}).requires_grad_()});
  const StepResult result = scaler.step(optimizer);
  CHECK(result.status == StepStatus::NoGradients);
  CHECK(text_of(result) == "no_gradients");
  CHECK(p.item<float>() == 1);
  scaler.update();
  CHECK(scaler.get_scale() == 4);
  CHECK(scaler.get_growth_tracker() == 0);
  CHECK(error_of([&] { scaler.update(); }) != "no error");

  p.mutable_grad() = values({4});  // beside an optimizer that has gradients, that one decides
  scaler.step(optimizer);
  scaler.step(empty);
  scaler.update();
  CHECK(scaler.get_scale() == 8);
}

TEST_CASE("GradScaler: every optimizer skips on its own, and one back-off is for all (N3)") {
  for (bool bad_first : {true, false}) {
    GradScaler scaler = used_scaler(cpu_options(2).growth_interval(1));
    const Tensor a = parameter(values({kInf})), b = parameter(values({2}));
    auto first = sgd({bad_first ? a : b}), second = sgd({bad_first ? b : a});
    scaler.unscale_(first);
    scaler.unscale_(second);
    CHECK((scaler.step(first).status == StepStatus::Skipped) == bad_first);
    CHECK((scaler.step(second).status == StepStatus::Skipped) == !bad_first);
    scaler.update();
    CHECK(a.item<float>() == 0);
    CHECK(b.item<float>() == -1);
    CHECK(scaler.get_scale() == 1);
  }
}

TEST_CASE("GradScaler: gradients that change between unscale_ and step are not looked at again (torch's contract)") {
  for (float bad : {kInf, kNaN}) {
    GradScaler scaler = used_scaler(2);
    const Tensor p = parameter(values({8}));
    auto optimizer = sgd({p});
    scaler.unscale_(optimizer);
    p.mutable_grad().fill_(bad);
    CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
    CHECK_FALSE(p.isfinite().item<bool>());
  }
}

// --- the scale over many steps ---------------------------------------------------------------------------------------

TEST_CASE("GradScaler: 166 overflows in a row leave a scale that still trains (N1, N1a)") {
  for (double floor : {1.0, 0x1p-126}) {
    GradScaler scaler = used_scaler(cpu_options().min_scale(floor));
    const Tensor p = parameter(values({kInf, 0}));
    auto optimizer = sgd({p});
    Warnings warnings;
    for (int i = 0; i < 166; ++i) {
      CHECK(scaler.step(optimizer).status == StepStatus::Skipped);
      scaler.update();
      p.mutable_grad() = values({kInf, 0});
    }
    CHECK(scaler.get_scale() == floor);
    p.mutable_grad() = scaler.scale(values({3, 4}));
    CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
    CHECK(at::equal(p, values({-3, -4})));
  }
}

TEST_CASE("GradScaler: calibration takes exactly the skips it needs (N40)") {
  GradScaler scaler = used_scaler();
  const Tensor p = at::zeros({1}, at::kHalf).requires_grad_();
  auto optimizer = sgd({p});
  std::vector<double> skipped_at;
  for (int i = 0; i < 10; ++i) {
    p.mutable_grad() = (values({8}) * scaler.get_scale()).to(at::kHalf);
    const StepResult result = scaler.step(optimizer);
    if (result.status == StepStatus::Skipped) {
      skipped_at.push_back(result.scale);
    }
    scaler.update();
  }
  CHECK(skipped_at == std::vector<double>{65536, 32768, 16384, 8192});
  CHECK(scaler.get_scale() == 4096);
}

TEST_CASE("GradScaler: gradients beyond fp16 train with a floor below 1, and never with the default one (N39)") {
  for (double floor : {1.0, 0x1p-10}) {
    GradScaler scaler = used_scaler(cpu_options().min_scale(floor));
    const Tensor p = at::zeros({1}).requires_grad_();
    auto optimizer = sgd({p});
    Warnings warnings;
    for (int i = 0; i < 20; ++i) {  // the fp16 backward rounds, the parameter's gradient is its fp32 copy
      p.mutable_grad() = (values({1e5}) * scaler.get_scale()).to(at::kHalf).to(at::kFloat);
      scaler.step(optimizer);
      scaler.update();
    }
    CHECK(scaler.get_scale() == (floor == 1 ? 1 : 0.5));
    CHECK((p.item<float>() < 0) == (floor < 1));
    CHECK(warnings.texts.size() == (floor == 1 ? 1 : 0));
  }
}

// --- gradients of every kind -----------------------------------------------------------------------------------------

TEST_CASE("GradScaler: any mix of dtypes and strides is unscaled, and one bad element is found anywhere") {
  const auto gradients = [] {
    std::vector<Tensor> result;
    for (auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat}) {
      result.push_back(at::full({4, 4}, 4.0, dtype));
      result.push_back(at::full({4, 4}, 4.0, dtype).t());
      result.push_back(at::full({4, 8}, 4.0, dtype).slice(1, 0, 4));
    }
    return result;
  };
  const size_t count = gradients().size();
  for (size_t bad = 0; bad <= count; ++bad) {
    for (float value : {kInf, kNaN}) {
      std::vector<Tensor> parameters;
      for (const Tensor& g : gradients()) {
        parameters.push_back(at::zeros({4, 4}, g.options()).requires_grad_());
        parameters.back().mutable_grad() = g;
      }
      if (bad < count) {
        parameters[bad].mutable_grad()[2][2] = value;
      }
      GradScaler scaler = used_scaler(4);
      auto optimizer = sgd(parameters);
      scaler.unscale_(optimizer);
      for (size_t i = 0; i < count; ++i) {
        CHECK((i == bad || at::equal(parameters[i].grad(), at::ones_like(parameters[i]))));
      }
      const StepResult result = scaler.step(optimizer);
      CHECK(result.param_index == (bad < count ? static_cast<int64_t>(bad) : -1));
      CHECK((result.status == StepStatus::Stepped) == (bad == count));
    }
  }
}

TEST_CASE("GradScaler: the imaginary part counts, and is unscaled") {
  GradScaler scaler = used_scaler(4);
  const Tensor p = parameter(at::complex(values({8}), values({-4})));
  auto optimizer = sgd({p});
  scaler.unscale_(optimizer);
  CHECK(at::equal(p.grad(), at::complex(values({2}), values({-1}))));
  scaler.update();
  p.mutable_grad() = at::complex(values({8}), values({kInf}));
  CHECK(scaler.step(optimizer).reason == SkipReason::Inf);
}

TEST_CASE("GradScaler: fp64 beyond fp32 is finite (N15)") {
  GradScaler scaler = used_scaler(2);
  const Tensor p = parameter(values({1e300}, at::kDouble));
  auto optimizer = sgd({p});
  CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
  CHECK(p.item<double>() == -5e299);
}

TEST_CASE("GradScaler: huge finite gradients, or infinities that cancel, are judged one by one (N13)") {
  Warnings at_the_floor;
  GradScaler scaler = used_scaler(1);
  auto finite = sgd({parameter(values({3e38, 3e38}))}), cancelling = sgd({parameter(values({kInf, -kInf}))});
  CHECK(scaler.step(finite).status == StepStatus::Stepped);
  CHECK(scaler.step(cancelling).status == StepStatus::Skipped);
}

TEST_CASE("GradScaler: a 16-bit gradient is unscaled in its own dtype, below whose range lies 0 (N2)") {
  GradScaler scaler = used_scaler();
  const Tensor fp16 = parameter(values({0.001, 65504}, at::kHalf)), bf16 = parameter(values({0.001}, at::kBFloat16));
  auto optimizer = sgd({fp16, bf16});
  scaler.unscale_(optimizer);
  CHECK(fp16.grad()[0].item<double>() == 0);
  CHECK(fp16.grad()[1].item<double>() == static_cast<double>(at::Half(static_cast<float>(kHalfMax / 65536))));
  CHECK(bf16.grad().item<double>() == at::BFloat16(0.001f) / 65536.0);
}

TEST_CASE("GradScaler: one gradient tensor of two parameters is unscaled once (N49)") {
  GradScaler scaler = used_scaler(2);
  const Tensor gradient = values({8});
  auto optimizer = sgd({parameter(gradient), parameter(gradient)});
  scaler.unscale_(optimizer);
  CHECK(gradient.item<float>() == 4);
}

TEST_CASE("GradScaler: gradients that are part of a graph are unscaled outside of it") {
  Warnings of_torch_about_the_cycle;
  GradScaler scaler = used_scaler(2);
  const Tensor p = values({3}).requires_grad_();
  scaler.scale(p * p).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  auto optimizer = sgd({p});
  CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
  CHECK(p.grad().item<float>() == 6);
  p.mutable_grad() = Tensor();
}

// --- sparse ----------------------------------------------------------------------------------------------------------

Tensor sparse(std::initializer_list<double> list, std::vector<int64_t> rows, at::ScalarType dtype) {
  const int64_t count = static_cast<int64_t>(rows.size());
  return at::sparse_coo_tensor(at::tensor(rows).view({1, count}), values(list, dtype), {4});
}

TEST_CASE("GradScaler: sparse duplicates are summed before the check (N14)") {
  struct Case {
    std::vector<int64_t> rows;
    double value;
    at::ScalarType dtype;
    bool overflows;
  };
  for (const Case& c : {Case{{1, 1}, 3e38, at::kFloat, true}, Case{{1, 2}, 3e38, at::kFloat, false},
                        Case{{1, 1}, 64000, at::kHalf, true}, Case{{1, 2}, 64000, at::kHalf, false},
                        Case{{1, 1}, 3e38, at::kBFloat16, true}, Case{{1, 1}, 1.5e308, at::kDouble, true}}) {
    GradScaler scaler = used_scaler(1);
    const Tensor p = at::zeros({4}, c.dtype).requires_grad_();
    p.mutable_grad() = sparse({c.value, c.value}, c.rows, c.dtype);
    auto optimizer = sgd({p});
    Warnings at_the_floor;
    const StepResult result = scaler.step(optimizer);
    CHECK((result.status == StepStatus::Skipped) == c.overflows);
    CHECK((result.reason == SkipReason::Inf) == c.overflows);
    CHECK(at::isfinite(p).all().item<bool>());
  }
}

TEST_CASE("GradScaler: sparse gradients are unscaled, stay sparse, and reach the optimizer") {
  GradScaler scaler = used_scaler(4);
  const Tensor p = at::zeros({4}).requires_grad_(), dense = parameter(values({4}));
  p.mutable_grad() = sparse({4, 8, 12}, {3, 1, 3}, at::kFloat);
  torch::optim::Adagrad optimizer({p, dense}, torch::optim::AdagradOptions(1.0));
  scaler.unscale_(optimizer);
  CHECK(p.grad().is_sparse());
  CHECK(at::equal(p.grad().to_dense(), values({0, 2, 0, 4})));
  CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
  CHECK(p[3].item<float>() < 0);
}

TEST_CASE("GradScaler: inf and NaN in sparse values are found") {
  for (float bad : {kInf, kNaN}) {
    GradScaler scaler = used_scaler(4);
    const Tensor p = at::zeros({4}).requires_grad_();
    p.mutable_grad() = sparse({bad, 1}, {0, 2}, at::kFloat);
    auto optimizer = sgd({p});
    CHECK(scaler.step(optimizer).status == StepStatus::Skipped);
  }
}

}  // namespace
}  // namespace allfinite::amp
