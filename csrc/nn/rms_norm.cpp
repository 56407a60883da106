// The module allfinite::nn::RMSNorm.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/nn/init.h>

#include <optional>
#include <utility>

#include "allfinite/nn.h"
#include "allfinite/ops/norms.h"
#include "nn/norm_options.h"
#include "ops/check.h"

namespace allfinite::nn {
namespace {

constexpr char kOp[] = "allfinite::nn::RMSNorm";

}  // namespace

RMSNormImpl::RMSNormImpl(RMSNormOptions options_) : options(std::move(options_)) {
  reset();
}

void RMSNormImpl::reset() {
  const auto& shape = options.normalized_shape();
  check_normalized_shape(kOp, shape);
  check::non_negative(kOp, "eps", options.eps().value_or(0));
  if (options.elementwise_affine()) {
    weight = register_parameter("weight", torch::empty(shape));
  } else {
    weight = register_parameter("weight", torch::Tensor(), /*requires_grad=*/false);
  }
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  if (options.elementwise_affine()) {
    torch::nn::init::ones_(weight);
  }
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "allfinite::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape()) << ", eps=";
  if (options.eps()) {
    stream << *options.eps();
  } else {
    stream << "None";
  }
  stream << ", elementwise_affine=" << options.elementwise_affine() << ")";
}

torch::Tensor RMSNormImpl::forward(const torch::Tensor& input) {
  return allfinite::rms_norm(input, options.normalized_shape(), weight, options.eps());
}

}  // namespace allfinite::nn
