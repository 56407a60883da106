// The module nn::RMSNorm: values, names in an archive, options, errors.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/serialize.h>

#include <sstream>

#include "allfinite/nn.h"
#include "amp_support.h"
#include "catch.h"

namespace allfinite::nn {
namespace {

using test::error_of;

TEST_CASE("nn::RMSNorm: gives torch's values, and loads what was saved") {
  RMSNorm saved(RMSNormOptions({2, 3}).eps(1e-3));
  saved->weight.data().uniform_(0.5, 2);
  std::stringstream file;
  torch::save(saved, file);
  RMSNorm norm(RMSNormOptions({2, 3}).eps(1e-3));
  torch::load(norm, file);
  const auto input = at::randn({4, 2, 3});
  const auto want = at::rms_norm(input, {2, 3}, saved->weight, 1e-3);
  CHECK(at::allclose(norm->forward(input), want, 1e-5, 1e-6));  // two fp32 summation orders
  const auto names = norm->named_parameters().keys();
  CHECK(names == std::vector<std::string>{"weight"});  // as torch.nn.RMSNorm's state dict
}

TEST_CASE("nn::RMSNorm: trains inside torch's containers, and clones") {
  torch::nn::Sequential model(RMSNorm(std::vector<int64_t>{8}));
  model->forward(at::randn({4, 8})).pow(4).sum().backward();
  const auto parameters = model->named_parameters();
  REQUIRE(parameters.size() == 1);
  CHECK(parameters["0.weight"].grad().abs().sum().item<float>() > 0);
  const auto copy = std::dynamic_pointer_cast<RMSNormImpl>(model->ptr(0)->clone());
  REQUIRE(copy);
  CHECK_FALSE(copy->weight.is_same(parameters["0.weight"]));
}

TEST_CASE("nn::RMSNorm: fp32 weight beside a 16-bit input, and no parameter without elementwise_affine") {
  CHECK(RMSNorm(std::vector<int64_t>{4})->forward(at::ones({2, 4}, at::kHalf)).scalar_type() == at::kHalf);
  RMSNorm plain(RMSNormOptions({4}).elementwise_affine(false));
  CHECK(plain->parameters().empty());
  CHECK(at::allclose(plain->forward(at::full({4}, 7.0f)), at::ones({4}), 0, 1e-6));  // eps and the rounding of 4 terms
}

TEST_CASE("nn::RMSNorm: prints its options") {
  std::ostringstream text;
  text << c10::str(RMSNorm(RMSNormOptions({2, 3}))) << ' ' << c10::str(RMSNorm(RMSNormOptions({4}).eps(0.5)));
  CHECK(text.str() ==
        "allfinite::nn::RMSNorm([2, 3], eps=None, elementwise_affine=true) "
        "allfinite::nn::RMSNorm([4], eps=0.5, elementwise_affine=true)");
}

TEST_CASE("nn::RMSNorm: options that make no sense are refused") {
  CHECK(error_of<c10::ValueError>([] { RMSNorm(std::vector<int64_t>{}); }) ==
        "allfinite::nn::RMSNorm: expected normalized_shape of at least one dimension and no negative size, but got []");
  CHECK(error_of<c10::ValueError>([] { RMSNorm(RMSNormOptions({4}).eps(-1)); }) ==
        "allfinite::nn::RMSNorm: expected eps >= 0 and finite, but got -1");
}

}  // namespace
}  // namespace allfinite::nn
