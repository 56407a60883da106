// allfinite::softmax from C++: values and gradients. Bad input: test_bad_calls.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "allfinite/ops.h"
#include "catch.h"

TEST_CASE("softmax: output of every dtype, with a mask and a scale") {
  at::manual_seed(0);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const auto x = at::randn({5, 33}).to(dtype), bias = at::randn({33}).to(dtype);
    const auto y = allfinite::softmax(x, -1, bias, 0.5);
    CHECK(y.scalar_type() == dtype);
    // One ulp at the largest weight, which is below 1.
    const double ulp = dtype == at::kHalf ? 0x1p-11 : dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-20;
    const auto exact = at::softmax(x.to(at::kDouble) * 0.5 + bias.to(at::kDouble), -1);
    CHECK((y.to(at::kDouble) - exact).abs().max().item<double>() <= ulp);
  }
}

TEST_CASE("softmax: gradients of input and mask; an undefined mask is an absent one") {
  at::manual_seed(0);
  const auto x = at::randn({4, 3, 6}, at::kDouble).requires_grad_(),
             bias = at::randn({6}, at::kDouble).requires_grad_();
  const auto dy = at::randn({4, 3, 6}, at::kDouble);
  const auto ours = torch::autograd::grad({allfinite::softmax(x, 1, bias, 2.0)}, {x, bias}, {dy});
  const auto theirs = torch::autograd::grad({at::softmax(x * 2.0 + bias, 1)}, {x, bias}, {dy});
  CHECK(at::allclose(ours[0], theirs[0]));
  CHECK(at::allclose(ours[1], theirs[1]));
  CHECK(at::equal(allfinite::softmax(x, 1, at::Tensor()), allfinite::softmax(x, 1)));
}

TEST_CASE("F7: a fully masked row of softmax is 0, with gradient 0") {
  const auto x = at::full({2, 3}, -std::numeric_limits<float>::infinity()).requires_grad_();
  const auto y = allfinite::softmax(x, 1);
  CHECK(at::equal(y, at::zeros({2, 3})));
  CHECK(at::equal(torch::autograd::grad({y}, {x}, {at::ones({2, 3})})[0], at::zeros({2, 3})));
}
