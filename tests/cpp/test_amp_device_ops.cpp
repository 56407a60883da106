// What the scaler does where AllFinite has no kernel: torch's ops with the additions, run on the CPU against our own.
#include "amp/device_ops.h"

#include <cmath>

#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using namespace allfinite::test;

std::vector<Tensor> gradients(at::ScalarType dtype) {
  at::manual_seed(1);
  const Tensor base = (at::randn({4, 8}) * 1000).to(dtype);
  return {base, base.clone().t(), base.clone().slice(1, 0, 3), at::empty({0}, dtype)};
}

TEST_CASE("Fallback of unscale_and_check_: the same values and flags as the kernels'") {
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
    const double large = dtype == at::kHalf ? 6e4 : 1e38;  // beyond the range after 1e5, but for fp64
    for (double bad : {1.0, large, double(kInf), double(kNaN)}) {
      for (float inverse : {1 / 65536.f, 1.f, 1e5f}) {
        auto ours = gradients(dtype), theirs = gradients(dtype);
        ours[2][3][1] = theirs[2][3][1] = bad;
        const Tensor found = at::zeros({}), reference = at::zeros({}), inv_scale = at::scalar_tensor(inverse);
        fallback::unscale_and_check_(theirs, found, inv_scale);
        allfinite::unscale_and_check_(ours, reference, inv_scale);
        CHECK(found.item<float>() == reference.item<float>());
        for (size_t i = 0; i < ours.size(); ++i) {
          CHECK(at::equal(at::nan_to_num(components(ours[i])), at::nan_to_num(components(theirs[i]))));
        }
      }
    }
  }
}

TEST_CASE("Fallback of unscale_and_check_: a flag is never cleared, and shared memory is unscaled once (N49)") {
  const Tensor gradient = values({8, 8}), expanded = values({8}).expand({5}), found = at::ones({});
  fallback::unscale_and_check_({gradient, gradient, expanded}, found, at::scalar_tensor(0.5));
  CHECK(at::equal(gradient, values({4, 4})));
  CHECK(at::equal(expanded, values({4, 4, 4, 4, 4})));
  CHECK(found.item<float>() == 1);
}

TEST_CASE("Fallback of unscale_and_check_: fp64 beyond fp32 is finite (N15)") {
  const Tensor gradient = values({1e300}, at::kDouble), found = at::zeros({});
  fallback::unscale_and_check_({gradient}, found, at::scalar_tensor(0.5));
  CHECK(found.item<float>() == 0);
  CHECK(gradient.item<double>() == 5e299);
}

TEST_CASE("Fallback of the norm: fp32 squares that overflow, and every dtype") {
  CHECK(fallback::norm({values({3e38, 4e38 / 2})}).item<double>() == Approx(std::hypot(3e38, 2e38)));
  CHECK(fallback::norm({values({3}, at::kHalf), at::complex(values({0}), values({4}))}).item<double>() == 5);
}

TEST_CASE(
    "Fallback of clip_grads_with_norm_: the same values as the kernels', and nothing at a norm that is not finite") {
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
    for (double total : {2.0, 1e300, double(kInf), double(kNaN)}) {
      auto ours = gradients(dtype), theirs = gradients(dtype);
      const Tensor norm = at::scalar_tensor(total, at::kDouble);
      fallback::clip_grads_with_norm_(theirs, 3.7, norm);
      allfinite::clip_grads_with_norm_(ours, 3.7, norm);
      for (size_t i = 0; i < ours.size(); ++i) {
        CHECK(at::equal(components(ours[i]), components(theirs[i])));
      }
    }
  }
}

TEST_CASE("Fallback of update_scale_: the same scale and tracker, bit for bit, at and beyond the bounds (N1, N19)") {
  for (double start : {0.25, 1.5, 123.456, 65536.0, 1e38}) {
    const ScalePolicy policy(1.37, 0.61, 3, 0.7, 9000.5);
    const Tensor scale = at::scalar_tensor(start), tracker = at::scalar_tensor(7, at::kInt);
    const Tensor reference = scale.clone(), reference_tracker = tracker.clone();
    for (int i = 0; i < 200; ++i) {
      const Tensor found = at::scalar_tensor(i % 7 == 5 || i % 50 > 40 ? 1.0 : 0.0);
      fallback::update_scale_(scale, tracker, found, policy);
      policy.update_(reference, reference_tracker, found);
      REQUIRE(scale.item<float>() == reference.item<float>());
      REQUIRE(tracker.item<int>() == reference_tracker.item<int>());
    }
  }
}

}  // namespace
}  // namespace allfinite::amp
