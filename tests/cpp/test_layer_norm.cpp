// allfinite::layer_norm from C++: values and gradients. Bad input: test_bad_calls.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "allfinite/ops.h"
#include "catch.h"

namespace {

at::Tensor reference(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  const auto wide = x.to(at::kDouble);
  const auto centred = wide - wide.mean(-1, true);
  const auto xhat = centred * (centred.square().mean(-1, true) + eps).rsqrt();
  return xhat * weight.to(at::kDouble) + bias.to(at::kDouble);
}

}  // namespace

TEST_CASE("layer_norm: output of every dtype, 16 bits with fp32 weights too") {
  at::manual_seed(0);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (auto weight_dtype : {dtype, dtype == at::kDouble ? at::kDouble : at::kFloat}) {
      const auto x = at::randn({5, 33}).to(dtype);
      const auto weight = at::randn({33}).to(weight_dtype), bias = at::randn({33}).to(weight_dtype);
      const auto y = allfinite::layer_norm(x, {33}, weight, bias);
      CHECK(y.scalar_type() == dtype);
      CHECK(y.sizes() == x.sizes());
      // Two roundings to the dtype at the largest output, which is below 16.
      const double ulp = dtype == at::kHalf ? 0x1p-7 : dtype == at::kBFloat16 ? 0x1p-4 : 0x1p-19;
      CHECK((y.to(at::kDouble) - reference(x, weight, bias, 1e-5)).abs().max().item<double>() <= ulp);
    }
  }
}

TEST_CASE("layer_norm: defaults, absent parameters and gradients") {
  at::manual_seed(0);
  const auto x = at::randn({4, 3, 6}, at::kDouble).requires_grad_();
  const auto weight = at::randn({3, 6}, at::kDouble).requires_grad_();
  CHECK(at::allclose(allfinite::layer_norm(x, {3, 6}), at::layer_norm(x, {3, 6})));
  const auto dy = at::randn({4, 3, 6}, at::kDouble);
  const auto ours = torch::autograd::grad({allfinite::layer_norm(x, {3, 6}, weight)}, {x, weight}, {dy});
  const auto theirs = torch::autograd::grad({at::layer_norm(x, {3, 6}, weight)}, {x, weight}, {dy});
  CHECK(at::allclose(ours[0], theirs[0]));
  CHECK(at::allclose(ours[1], theirs[1]));
}

TEST_CASE("layer_norm: an undefined tensor is an absent parameter, as everywhere in C++") {
  const auto x = at::randn({4, 6}).requires_grad_();
  const auto plain = allfinite::layer_norm(x, {6});
  const auto undefined = allfinite::layer_norm(x, {6}, at::Tensor(), at::Tensor());
  CHECK(at::equal(undefined, plain));
  const auto dy = at::randn({4, 6});
  const auto ours = torch::autograd::grad({undefined}, {x}, {dy}), theirs = torch::autograd::grad({plain}, {x}, {dy});
  CHECK(at::equal(ours[0], theirs[0]));
}

TEST_CASE("F1: layer_norm of rows of 1e30 and of zeros") {
  const auto huge = at::tensor({1e30f, -1e30f, 1e30f, -1e30f});
  CHECK(at::equal(allfinite::layer_norm(huge, {4}), at::tensor({1.0f, -1.0f, 1.0f, -1.0f})));
  const auto zeros = at::zeros({1, 10}, at::kHalf);
  CHECK(at::equal(allfinite::layer_norm(zeros, {10}, {}, {}, 1e-12), zeros));
}
