// The module allfinite::nn::LayerNorm.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <utility>

#include "allfinite/nn.h"
#include "allfinite/ops/norms.h"
#include "nn/norm_options.h"
#include "ops/check.h"

namespace allfinite::nn {
namespace {

constexpr char kOp[] = "allfinite::nn::LayerNorm";

}  // namespace

LayerNormImpl::LayerNormImpl(torch::nn::LayerNormOptions options_) : options(std::move(options_)) {
  reset();
}

void LayerNormImpl::reset() {
  const auto& shape = options.normalized_shape();
  check_normalized_shape(kOp, shape);
  check::non_negative(kOp, "eps", options.eps());
  if (options.elementwise_affine()) {
    weight = register_parameter("weight", torch::empty(shape));
    bias = register_parameter("bias", torch::empty(shape));
  } else {
    weight = register_parameter("weight", torch::Tensor(), /*requires_grad=*/false);
    bias = register_parameter("bias", torch::Tensor(), /*requires_grad=*/false);
  }
  reset_parameters();
}

void LayerNormImpl::reset_parameters() {
  if (options.elementwise_affine()) {
    torch::nn::init::ones_(weight);
    torch::nn::init::zeros_(bias);
  }
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "allfinite::nn::LayerNorm(" << at::IntArrayRef(options.normalized_shape())
         << ", eps=" << options.eps() << ", elementwise_affine=" << options.elementwise_affine() << ")";
}

torch::Tensor LayerNormImpl::forward(const torch::Tensor& input) {
  const auto optional = [](const torch::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return allfinite::layer_norm(input, options.normalized_shape(), optional(weight), optional(bias), options.eps());
}

}  // namespace allfinite::nn
