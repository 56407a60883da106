// allfinite::rms_norm from C++: values and gradients. Bad input: test_bad_calls.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "allfinite/ops/norms.h"
#include "catch.h"

TEST_CASE("rms_norm: output of every dtype, 16 bits with fp32 weights too") {
  at::manual_seed(0);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (auto weight_dtype : {dtype, dtype == at::kDouble ? at::kDouble : at::kFloat}) {
      const auto x = at::randn({5, 33}).to(dtype), weight = at::randn({33}).to(weight_dtype);
      const auto y = allfinite::rms_norm(x, {33}, weight, 1e-5);
      CHECK(y.scalar_type() == dtype);
      CHECK(y.sizes() == x.sizes());
      const auto wide = x.to(at::kDouble);
      const auto want = wide * (wide.square().mean(-1, true) + 1e-5).rsqrt() * weight.to(at::kDouble);
      // Two roundings to the dtype at the largest output, which is below 16.
      const double ulp = dtype == at::kHalf ? 0x1p-7 : dtype == at::kBFloat16 ? 0x1p-4 : 0x1p-19;
      CHECK((y.to(at::kDouble) - want).abs().max().item<double>() <= ulp);
    }
  }
}

TEST_CASE("rms_norm: defaults, absent and undefined weight, gradients") {
  at::manual_seed(0);
  const auto x = at::randn({4, 3, 6}, at::kDouble).requires_grad_();
  const auto weight = at::randn({3, 6}, at::kDouble).requires_grad_();
  CHECK(at::allclose(allfinite::rms_norm(x, {3, 6}), at::rms_norm(x, {3, 6})));
  CHECK(at::equal(allfinite::rms_norm(x, {3, 6}, at::Tensor()), allfinite::rms_norm(x, {3, 6})));
  const auto dy = at::randn({4, 3, 6}, at::kDouble);
  const auto ours = torch::autograd::grad({allfinite::rms_norm(x, {3, 6}, weight)}, {x, weight}, {dy});
  const auto theirs = torch::autograd::grad({at::rms_norm(x, {3, 6}, weight)}, {x, weight}, {dy});
  CHECK(at::allclose(ours[0], theirs[0]));
  CHECK(at::allclose(ours[1], theirs[1]));
}

TEST_CASE("F1: rms_norm of rows of 1e30, of 300 in fp16 and of zeros") {
  const auto huge = at::tensor({1e30f, -1e30f, 1e30f, -1e30f});
  CHECK(at::equal(allfinite::rms_norm(huge, {4}), at::tensor({1.0f, -1.0f, 1.0f, -1.0f})));
  const auto half = at::full({2, 16}, 300, at::kHalf);
  CHECK(at::equal(allfinite::rms_norm(half, {16}), at::ones_like(half)));
  const auto zeros = at::zeros({1, 10}, at::kHalf);
  CHECK(at::equal(allfinite::rms_norm(zeros, {10}, {}, 0.0), zeros));
}
