// allfinite::add_layer_norm and add_rms_norm from C++: values, gradients, and messages, which are those of Python.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "allfinite/ops/norms.h"
#include "bad_calls.h"
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

TEST_CASE("add_*_norm: bad input is refused with type and message") {
  const auto x = at::ones({2, 4}), w = at::ones({4}), half = x.to(at::kHalf);
  const auto check_op = [&](const char* name, auto op) {
    check_refused(name,
                  {
                      {[&] { op(at::Tensor(), x, w); }, "TypeError", "expected input to be a tensor, but got none"},
                      {[&] { op(x, at::Tensor(), w); }, "TypeError", "expected residual to be a tensor, but got none"},
                      {[&] { op(x, w, w); }, "ValueError", "expected residual of input's shape, [2, 4], but got [4]"},
                      {[&] { op(x, half, w); }, "TypeError",
                       "expected residual of input's dtype, Float, or float32 beside a 16-bit input, but got Half"},
                      {[&] { op(half, x.to(at::kDouble), w); }, "TypeError",
                       "expected residual of input's dtype, Half, or float32 beside a 16-bit input, but got Double"},
                      {[&] { op(x, x.to(at::kMeta), w); }, "Error",
                       "expected residual on the device of input, cpu, but got meta"},
                      {[&] { op(x, x.to_sparse(), w); }, "NotImplementedError",
                       "expected residual to be a dense (strided) tensor, but got layout Sparse"},
                      {[&] { op(x, x, at::ones({3})); }, "ValueError", "expected weight of shape [4], but got [3]"},
                  });
  };
  check_op("allfinite::add_layer_norm", [](const at::Tensor& input, const at::Tensor& residual, const at::Tensor& w) {
    allfinite::add_layer_norm(input, residual, {4}, w);
  });
  check_op("allfinite::add_rms_norm", [](const at::Tensor& input, const at::Tensor& residual, const at::Tensor& w) {
    allfinite::add_rms_norm(input, residual, {4}, w);
  });
}
