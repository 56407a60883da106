// allfinite::add_layer_norm and add_rms_norm from C++: values and gradients. Bad input: test_bad_calls.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "allfinite/ops/norms.h"
#include "catch.h"

TEST_CASE("add_*_norm: the norm of the stored sum, and the sum, in every dtype") {
  at::manual_seed(0);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (auto residual_dtype : {dtype, dtype == at::kDouble ? at::kDouble : at::kFloat}) {
      const auto x = at::randn({5, 33}).to(dtype), residual = at::randn({5, 33}).to(residual_dtype);
      const auto weight = at::randn({33}).to(dtype), bias = at::randn({33}).to(dtype);
      const auto sum = (x.to(residual_dtype) + residual).to(residual_dtype);
      const auto wide = sum.to(at::kDouble);
      // Two roundings to the dtype at the largest output, which is below 16.
      const double ulp = dtype == at::kHalf ? 0x1p-7 : dtype == at::kBFloat16 ? 0x1p-4 : 0x1p-19;
      const auto near = [&](const at::Tensor& y, const at::Tensor& want) {
        return y.scalar_type() == dtype && (y.to(at::kDouble) - want).abs().max().item<double>() <= ulp;
      };
      const auto [y, total] = allfinite::add_layer_norm(x, residual, {33}, weight, bias);
      CHECK(at::equal(total, sum));
      CHECK(near(y, at::layer_norm(wide, {33}, weight.to(at::kDouble), bias.to(at::kDouble))));
      const auto [z, again] = allfinite::add_rms_norm(x, residual, {33}, weight, 1e-5);
      CHECK(at::equal(again, sum));
      CHECK(near(z, at::rms_norm(wide, {33}, weight.to(at::kDouble), 1e-5)));
    }
  }
}

TEST_CASE("add_*_norm: defaults, undefined parameters and gradients through both outputs") {
  at::manual_seed(0);
  const auto x = at::randn({4, 6}, at::kDouble).requires_grad_();
  const auto residual = at::randn({4, 6}, at::kDouble).requires_grad_();
  const auto dy = at::randn({4, 6}, at::kDouble), dsum = at::randn({4, 6}, at::kDouble);
  const auto gradients = [&](const std::tuple<at::Tensor, at::Tensor>& outputs) {
    return torch::autograd::grad({std::get<0>(outputs), std::get<1>(outputs)}, {x, residual}, {dy, dsum});
  };
  const auto sum = x + residual;
  const auto check_same = [&](const std::tuple<at::Tensor, at::Tensor>& ours, const at::Tensor& norm) {
    CHECK(at::allclose(std::get<0>(ours), norm));
    CHECK(at::equal(std::get<1>(ours), sum));
    const auto mine = gradients(ours);
    const auto theirs = torch::autograd::grad({norm, sum}, {x, residual}, {dy, dsum}, /*retain_graph=*/true);
    CHECK(at::allclose(mine[0], theirs[0]));
    CHECK(at::allclose(mine[1], theirs[1]));
  };
  check_same(allfinite::add_layer_norm(x, residual, {6}), at::layer_norm(sum, {6}));
  check_same(allfinite::add_layer_norm(x, residual, {6}, at::Tensor(), at::Tensor()), at::layer_norm(sum, {6}));
  check_same(allfinite::add_rms_norm(x, residual, {6}), at::rms_norm(sum, {6}));
}

TEST_CASE("F1: a fp32 residual carries fp16 beyond 65504") {
  const auto x = at::full({1, 4}, 60000, at::kHalf), residual = at::full({1, 4}, 2.8e5, at::kFloat);
  const auto [y, sum] = allfinite::add_rms_norm(x, residual, {4});
  CHECK(at::equal(y, at::ones({1, 4}, at::kHalf)));
  CHECK(at::equal(sum, at::full({1, 4}, 3.4e5, at::kFloat)));
}
