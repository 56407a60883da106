// GradScaler: options, scale(), the order of calls, update(). Steps and skips: test_grad_scaler_step.cpp.
#include "allfinite/amp/grad_scaler.h"

#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using namespace allfinite::test;

// --- options ---------------------------------------------------------------------------------------------------------

TEST_CASE("GradScaler: the defaults are torch's") {
  const GradScaler scaler(GradScalerOptions().device(at::kCPU));
  CHECK(scaler.get_scale() == 65536);
  CHECK(scaler.get_growth_factor() == 2);
  CHECK(scaler.get_backoff_factor() == 0.5);
  CHECK(scaler.get_growth_interval() == 2000);
  CHECK(scaler.get_growth_tracker() == 0);
  CHECK(scaler.get_min_scale() == 1);
  CHECK(scaler.get_max_scale() == 0x1p24);
  CHECK(scaler.is_enabled());
}

TEST_CASE("GradScaler: options are validated (N20)") {
  const auto refused = [](const GradScalerOptions& options) {
    return error_of<c10::ValueError>([&] { GradScaler scaler(options); });
  };
  for (double bad : {double(kNaN), double(kInf), 0.0, -1.0}) {
    CHECK(refused(cpu_options().init_scale(bad)) != "no error");
    CHECK(refused(cpu_options().growth_factor(bad)) != "no error");
    CHECK(refused(cpu_options().backoff_factor(bad)) != "no error");
    CHECK(refused(cpu_options().min_scale(bad)) != "no error");
    CHECK(refused(cpu_options().max_scale(bad)) != "no error");
  }
  CHECK(refused(cpu_options().growth_interval(0)) != "no error");
  CHECK(refused(cpu_options().min_scale(8).max_scale(4)) != "no error");
  CHECK(refused(cpu_options().init_scale(0)) ==
        "allfinite::ScalePolicy: expected init_scale to be finite and > 0 as float32, but got 0");
}

TEST_CASE("GradScaler: setters are validated and take effect") {
  GradScaler scaler(cpu_options());
  CHECK(error_of<c10::ValueError>([&] { scaler.set_growth_factor(kNaN); }) != "no error");
  CHECK(error_of<c10::ValueError>([&] { scaler.set_backoff_factor(-0.5); }) != "no error");
  CHECK(error_of<c10::ValueError>([&] { scaler.set_growth_interval(0); }) != "no error");
  CHECK(scaler.policy() == ScalePolicy());
  scaler.set_growth_interval(50);
  CHECK(scaler.get_growth_interval() == 50);
}

TEST_CASE("GradScaler: a CUDA scaler without CUDA warns and is disabled") {
  if (at::hasCUDA()) {
    return;
  }
  Warnings warnings;
  const GradScaler scaler;
  CHECK_FALSE(scaler.is_enabled());
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0] == "allfinite::GradScaler: expected a CUDA device, but CUDA is not available. Disabling.");
}

TEST_CASE("GradScaler: a disabled scaler passes everything through") {
  GradScaler scaler(cpu_options().enabled(false));
  const Tensor loss = at::ones({}, at::kHalf), p = parameter(values({kInf}));
  auto optimizer = sgd({p});
  CHECK(scaler.scale(loss).is_same(loss));
  scaler.unscale_(optimizer);
  scaler.unscale_(optimizer);
  CHECK(scaler.get_scale() == 1);
  CHECK(scaler.get_growth_tracker() == 0);
  CHECK(scaler.get_growth_interval() == 2000);
  const auto result = scaler.step(optimizer, [] { return values({3}).sum(); });
  CHECK(result.status == StepStatus::Stepped);
  CHECK(result.loss.item<float>() == 3);
  CHECK(p.item<float>() == -kInf);
  scaler.update();
  scaler.update(8);
}

// --- scale -----------------------------------------------------------------------------------------------------------

TEST_CASE("GradScaler::scale: 16-bit losses of any shape come back finite, in fp32") {
  GradScaler scaler(cpu_options());
  for (auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const Tensor& loss : {at::full({}, 2.0, dtype), at::full({3}, 2.0, dtype)}) {
      const Tensor scaled = scaler.scale(loss);
      CHECK(scaled.scalar_type() == at::kFloat);
      CHECK(scaled.sizes() == loss.sizes());
      CHECK((scaled == 131072).all().item<bool>());
    }
  }
}

TEST_CASE("GradScaler::scale: integers become fp32, fp64 and complex stay") {
  GradScaler scaler(cpu_options(4));
  CHECK(scaler.scale(at::ones({2}, at::kInt)).scalar_type() == at::kFloat);
  CHECK(scaler.scale(at::ones({2}, at::kDouble)).scalar_type() == at::kDouble);
  CHECK(scaler.scale(at::ones({2}, at::kComplexFloat)).scalar_type() == at::kComplexFloat);
}

TEST_CASE("GradScaler::scale: a list is scaled one by one, and the result is differentiable") {
  GradScaler scaler(cpu_options(4));
  const Tensor x = values({3}).requires_grad_();
  const auto scaled = scaler.scale(std::vector<Tensor>{x.sum(), x * 2});
  REQUIRE(scaled.size() == 2);
  CHECK(scaled[1].item<float>() == 24);
  scaled[0].backward();
  CHECK(x.grad().item<float>() == 4);
  CHECK(scaler.scale(std::vector<Tensor>{}).empty());
}

TEST_CASE("GradScaler::scale: an undefined tensor is refused") {
  GradScaler scaler(cpu_options());
  CHECK(error_of<c10::ValueError>([&] { scaler.scale(Tensor()); }) ==
        "allfinite::GradScaler::scale: expected a tensor, but got an undefined one");
}

// --- the order of calls ----------------------------------------------------------------------------------------------

TEST_CASE("GradScaler: unscale_, step and update before any scale are refused") {
  GradScaler scaler(cpu_options());
  auto optimizer = sgd({parameter(values({1}))});
  const std::string tail =
      ": expected scale() to be called first, but got no scale yet. This may indicate your script did not use "
      "scaler.scale(loss or outputs) earlier in the iteration.";
  CHECK(error_of([&] { scaler.unscale_(optimizer); }) == "allfinite::GradScaler::unscale_" + tail);
  CHECK(error_of([&] { scaler.step(optimizer); }) == "allfinite::GradScaler::step" + tail);
  CHECK(error_of([&] { scaler.update(); }) == "allfinite::GradScaler::update" + tail);
  CHECK(error_of([&] { scaler.clip_grad_norm_(optimizer, 1); }) == "allfinite::GradScaler::clip_grad_norm_" + tail);
}

TEST_CASE("GradScaler: calls out of order are refused with torch's words, and update makes ready again") {
  GradScaler scaler = used_scaler(2);
  const Tensor p = parameter(values({8}));
  auto optimizer = sgd({p});
  scaler.unscale_(optimizer);
  CHECK(error_of([&] { scaler.unscale_(optimizer); }) ==
        "allfinite::GradScaler::unscale_: expected one call in an iteration, but got a second: unscale_() has already "
        "been called on this optimizer since the last update().");
  CHECK(p.grad().item<float>() == 4);
  scaler.step(optimizer);
  CHECK(error_of([&] { scaler.step(optimizer); }) ==
        "allfinite::GradScaler::step: expected one call in an iteration, but got a second: step() has already been "
        "called since the last update().");
  CHECK(error_of([&] { scaler.unscale_(optimizer); }) ==
        "allfinite::GradScaler::unscale_: expected a call before step(), but got one after it: unscale_() is being "
        "called after step().");
  CHECK(error_of([&] { scaler.clip_grad_norm_(optimizer, 1); }) ==
        "allfinite::GradScaler::clip_grad_norm_: expected a call before step(), but got one after it: "
        "clip_grad_norm_() is being called after step().");
  CHECK(p.item<float>() == -4);
  scaler.update();
  scaler.unscale_(optimizer);
  CHECK(p.grad().item<float>() == 2);
}

TEST_CASE("GradScaler: update with nothing recorded is refused") {
  GradScaler scaler = used_scaler();
  CHECK(error_of([&] { scaler.update(); }) ==
        "allfinite::GradScaler::update: expected unscale_() or step() since the last update(), but got neither: No inf "
        "checks were recorded prior to update.");
}

TEST_CASE("GradScaler: a call that was refused counts as no call") {
  Warnings of_torch_about_csr;
  GradScaler scaler = used_scaler();
  const Tensor p = at::zeros({2, 2}).requires_grad_();
  p.mutable_grad() = at::ones({2, 2}).to_sparse_csr();
  auto optimizer = sgd({p});
  CHECK(error_of<c10::NotImplementedError>([&] { scaler.unscale_(optimizer); }) ==
        "allfinite::GradScaler::unscale_: expected dense or sparse COO gradients, but got layout SparseCsr in "
        "parameter group 0, index 0");
  CHECK(error_of([&] { scaler.update(); }) != "no error");
}

TEST_CASE("GradScaler: a closure is refused before it runs, an empty one is not (N22)") {
  GradScaler scaler = used_scaler();
  const Tensor p = parameter(values({65536}));
  auto optimizer = sgd({p});
  bool ran = false;
  const auto closure = [&] {
    ran = true;
    return Tensor();
  };
  CHECK(error_of([&] { scaler.step(optimizer, closure); }) ==
        "allfinite::GradScaler::step: expected no closure, but got one: Closure use is not currently supported if "
        "GradScaler is enabled.");
  CHECK_FALSE(ran);
  CHECK(scaler.step(optimizer, nullptr).status == StepStatus::Stepped);
}

TEST_CASE("GradScaler: a parameter in two optimizers is refused at the second unscale_, by name (N8)") {
  GradScaler scaler = used_scaler(2);
  const Tensor shared = parameter(values({8})), own = parameter(values({8}));
  auto first = sgd({shared}), second = sgd({own, shared});
  torch::OrderedDict<std::string, Tensor> names;
  names.insert("encoder.weight", shared);
  scaler.name_parameters(names);
  scaler.unscale_(first);
  CHECK(error_of([&] { scaler.unscale_(second); }) ==
        "allfinite::GradScaler::unscale_: expected each parameter in one optimizer, but got parameter group 0, index 1 "
        "(encoder.weight), whose gradient has already been unscaled for another optimizer since the last update()");
  CHECK(shared.grad().item<float>() == 4);
  CHECK(own.grad().item<float>() == 8);
  scaler.update();
  scaler.unscale_(second);
  CHECK(shared.grad().item<float>() == 2);
}

TEST_CASE("GradScaler: one gradient tensor in two optimizers is refused as well") {
  GradScaler scaler = used_scaler(2);
  const Tensor gradient = values({8});
  auto first = sgd({parameter(gradient)}), second = sgd({parameter(gradient)});
  scaler.unscale_(first);
  CHECK(error_of([&] { scaler.unscale_(second); }) != "no error");
  CHECK(gradient.item<float>() == 4);
}

TEST_CASE("GradScaler: a new optimizer at the address of one that is gone starts ready") {
  GradScaler scaler = used_scaler(2);
  alignas(torch::optim::SGD) unsigned char memory[sizeof(torch::optim::SGD)];
  for (int i = 0; i < 3; ++i) {
    const Tensor p = parameter(values({8}));
    auto* optimizer = new (memory) torch::optim::SGD({p}, torch::optim::SGDOptions(1.0));
    CHECK(scaler.step(*optimizer).status == StepStatus::Stepped);
    CHECK(p.item<float>() == -4);
    optimizer->~SGD();
  }
}

// --- update ----------------------------------------------------------------------------------------------------------

TEST_CASE("GradScaler::update: an interval lowered below the tracker still grows (N19)") {
  GradScaler scaler = used_scaler(cpu_options(8).growth_interval(100));
  const Tensor p = parameter(values({0}));
  auto optimizer = sgd({p});
  for (int i = 0; i < 60; ++i) {
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(scaler.get_growth_tracker() == 60);
  scaler.set_growth_interval(50);
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.get_scale() == 16);
  CHECK(scaler.get_growth_tracker() == 0);
}

TEST_CASE("GradScaler::update: a growing scale never overflows") {
  GradScaler scaler = used_scaler(cpu_options(1e38).growth_factor(16).growth_interval(1).max_scale(0x1p126));
  auto optimizer = sgd({parameter(values({1}))});
  scaler.step(optimizer);
  scaler.update();
  CHECK(scaler.get_scale() == static_cast<float>(1e38));
}

TEST_CASE("GradScaler::update: a new scale is taken if it is finite and positive, and the tracker stays (N20)") {
  GradScaler scaler = used_scaler(cpu_options());
  auto optimizer = sgd({parameter(values({1}))});
  scaler.step(optimizer);
  scaler.update();
  for (double bad : {0.0, -4.0, double(kInf), double(kNaN), 1e-60, 1e39}) {
    CHECK(error_of<c10::ValueError>([&] { scaler.update(bad); }) != "no error");
    CHECK(error_of<c10::ValueError>([&] { scaler.update(at::full({}, bad, at::kDouble)); }) != "no error");
  }
  CHECK(scaler.get_scale() == 65536);
  scaler.update(1024);
  CHECK(scaler.get_scale() == 1024);
  CHECK(scaler.get_growth_tracker() == 1);
  scaler.update(at::scalar_tensor(0.25));  // below the floor: the user's choice
  CHECK(scaler.get_scale() == 0.25);
}

TEST_CASE("GradScaler::update: a tensor of one element and one dimension is taken (N48)") {
  GradScaler scaler = used_scaler();
  scaler.update(values({32}));
  CHECK(scaler.get_scale() == 32);
}

TEST_CASE("GradScaler::update: a tensor that is no scale is refused") {
  GradScaler scaler = used_scaler();
  CHECK(error_of<c10::ValueError>([&] { scaler.update(values({1, 2})); }) ==
        "allfinite::GradScaler::update: expected new_scale of one element, but got 2");
  CHECK(error_of<c10::ValueError>([&] { scaler.update(values({1}).requires_grad_()); }) ==
        "allfinite::GradScaler::update: expected new_scale without requires_grad, but got one that requires it");
  CHECK(error_of<c10::TypeError>([&] { scaler.update(at::ones({}, at::kLong)); }) ==
        "allfinite::GradScaler::update: expected new_scale of a floating point dtype, but got Long");
  CHECK(error_of<c10::ValueError>([&] { scaler.update(at::empty({}, at::device(at::kMeta))); }) ==
        "allfinite::GradScaler::update: expected new_scale on a device of type cpu, but got meta");
  CHECK(scaler.get_scale() == 65536);
}

TEST_CASE("GradScaler::update: a new scale makes optimizers ready again") {
  GradScaler scaler = used_scaler(2);
  const Tensor p = parameter(values({8}));
  auto optimizer = sgd({p});
  scaler.unscale_(optimizer);
  scaler.update(4);
  scaler.unscale_(optimizer);
  CHECK(p.grad().item<float>() == 1);
}

}  // namespace
}  // namespace allfinite::amp
