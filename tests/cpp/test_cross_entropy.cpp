// allfinite::cross_entropy and nn::CrossEntropyLoss from C++: values, gradients. Bad input: test_bad_calls.cpp.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/loss.h>
#include <torch/serialize.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "allfinite/nn.h"
#include "allfinite/ops.h"
#include "catch.h"
#include "error_text.h"

TEST_CASE("cross_entropy: every option is torch's, and so are the gradients") {
  at::manual_seed(0);
  const auto x = at::randn({6, 5, 2}, at::kDouble).requires_grad_(), weight = at::rand({5}, at::kDouble);
  const auto target = at::randint(0, 5, {6, 2}, at::kLong);
  target[1][0] = -100;
  for (double smoothing : {0.0, 0.2}) {
    const auto ours = allfinite::cross_entropy(x, target, weight, -100, "sum", smoothing);
    const auto theirs = at::cross_entropy_loss(x, target, weight, at::Reduction::Sum, -100, smoothing);
    CHECK(at::allclose(ours, theirs));
    CHECK(at::allclose(torch::autograd::grad({ours}, {x})[0], torch::autograd::grad({theirs}, {x})[0]));
  }
  CHECK(at::allclose(allfinite::cross_entropy(x, target), at::cross_entropy_loss(x, target)));
}

TEST_CASE("cross_entropy: fp32 loss of 16-bit logits; an undefined weight is none; z_loss") {
  const auto x = at::zeros({1, 128256}, at::kHalf), target = at::zeros({1}, at::kLong);
  const auto loss = allfinite::cross_entropy(x, target, at::Tensor(), -100, "mean", 0.0, 0.5);
  CHECK(loss.scalar_type() == at::kFloat);
  const double lse = std::log(128256.0);
  CHECK(std::abs(loss.item<double>() - (lse + 0.5 * lse * lse)) < 1e-4);  // half an ulp of 81 is 4e-6
}

TEST_CASE("F2: cross_entropy does not read ignored rows") {
  auto x = at::full({2, 3}, std::numeric_limits<float>::quiet_NaN());
  x[0] = at::ones({3});
  x.requires_grad_();
  const auto target = at::tensor({1, -100}, at::kLong);
  const auto loss = allfinite::cross_entropy(x, target);
  CHECK(at::allclose(loss, at::log(at::full({}, 3.0f))));
  CHECK(at::equal(torch::autograd::grad({loss}, {x})[0][1], at::zeros({3})));
}

TEST_CASE("nn::CrossEntropyLoss: options of torch's module, its archive, clone and z_loss") {
  const auto options =
      torch::nn::CrossEntropyLossOptions().weight(at::rand({3})).reduction(torch::kSum).ignore_index(1);
  torch::nn::CrossEntropyLoss theirs(options);
  allfinite::nn::CrossEntropyLoss ours(torch::nn::CrossEntropyLossOptions(options).weight(at::ones({3})));
  std::stringstream file;
  torch::save(theirs, file);
  torch::load(ours, file);
  const auto x = at::randn({8, 3}), target = at::randint(0, 3, {8}, at::kLong);
  CHECK(at::allclose(ours->forward(x, target), theirs->forward(x, target)));
  const auto copy = std::dynamic_pointer_cast<allfinite::nn::CrossEntropyLossImpl>(ours->clone());
  REQUIRE(copy);
  CHECK(at::equal(copy->weight, ours->weight));
  CHECK_FALSE(copy->weight.is_same(ours->weight));
  allfinite::nn::CrossEntropyLoss with_z(torch::nn::CrossEntropyLossOptions(), 0.5);
  CHECK(at::equal(with_z->forward(x, target), allfinite::cross_entropy(x, target, {}, -100, "mean", 0.0, 0.5)));
  CHECK(error_text<c10::ValueError>([] {
          allfinite::nn::CrossEntropyLoss(torch::nn::CrossEntropyLossOptions(), -1.0);
        }) == "allfinite::nn::CrossEntropyLoss: expected z_loss >= 0 and finite, but got -1");
}
