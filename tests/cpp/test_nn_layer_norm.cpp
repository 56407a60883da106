// The module nn::LayerNorm against torch::nn::LayerNorm: names, values, errors.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>
#include <torch/serialize.h>

#include <sstream>

#include "allfinite/nn.h"
#include "amp_support.h"
#include "catch.h"

namespace allfinite::nn {
namespace {

using test::error_of;

TEST_CASE("nn::LayerNorm: loads what torch's saved, and gives its values") {
  torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({2, 3}).eps(1e-3));
  theirs->weight.data().uniform_(0.5, 2);
  theirs->bias.data().uniform_(-1, 1);
  std::stringstream file;
  torch::save(theirs, file);
  LayerNorm ours(torch::nn::LayerNormOptions({2, 3}).eps(1e-3));
  torch::load(ours, file);
  const auto input = at::randn({4, 2, 3});
  CHECK(at::allclose(ours->forward(input), theirs->forward(input), 1e-5, 1e-6));  // two fp32 summation orders
}

TEST_CASE("nn::LayerNorm: trains inside torch's containers, and clones") {
  torch::nn::Sequential model(LayerNorm(std::vector<int64_t>{8}));
  model->forward(at::randn({4, 8})).pow(3).sum().backward();
  const auto parameters = model->named_parameters();
  REQUIRE(parameters.size() == 2);
  CHECK(parameters["0.weight"].grad().abs().sum().item<float>() > 0);
  CHECK(parameters["0.bias"].grad().defined());
  const auto copy = std::dynamic_pointer_cast<LayerNormImpl>(model->ptr(0)->clone());
  REQUIRE(copy);
  CHECK_FALSE(copy->weight.is_same(parameters["0.weight"]));
}

TEST_CASE("nn::LayerNorm: fp32 parameters beside a 16-bit input") {
  LayerNorm norm(std::vector<int64_t>{4});
  CHECK(norm->forward(at::ones({2, 4}, at::kHalf)).scalar_type() == at::kHalf);
}

TEST_CASE("nn::LayerNorm: without elementwise_affine there is no parameter") {
  LayerNorm norm(torch::nn::LayerNormOptions({4}).elementwise_affine(false));
  CHECK(norm->parameters().empty());
  CHECK(at::allclose(norm->forward(at::arange(4, at::kFloat)).mean(), at::zeros({}), 0, 1e-6));  // rounding of 4 terms
}

TEST_CASE("nn::LayerNorm: options that make no sense are refused") {
  CHECK(error_of<c10::ValueError>([] { LayerNorm(std::vector<int64_t>{}); }) ==
        "allfinite::nn::LayerNorm: expected normalized_shape of at least one dimension and no negative size, but got "
        "[]");
  CHECK(error_of<c10::ValueError>([] { LayerNorm(torch::nn::LayerNormOptions({4}).eps(-1)); }) ==
        "allfinite::nn::LayerNorm: expected eps >= 0 and finite, but got -1");
}

}  // namespace
}  // namespace allfinite::nn
