// The module allfinite::nn::CrossEntropyLoss.
#include <torch/enum.h>

#include <string_view>
#include <utility>
#include <variant>

#include "allfinite/nn.h"
#include "allfinite/ops/losses.h"
#include "ops/check.h"

namespace allfinite::nn {
namespace {

constexpr char kOp[] = "allfinite::nn::CrossEntropyLoss";

std::string_view reduction_name(const torch::nn::CrossEntropyLossOptions::reduction_t& reduction) {
  if (std::holds_alternative<torch::enumtype::kNone>(reduction)) {
    return "none";
  }
  return std::holds_alternative<torch::enumtype::kMean>(reduction) ? "mean" : "sum";
}

}  // namespace

CrossEntropyLossImpl::CrossEntropyLossImpl(torch::nn::CrossEntropyLossOptions options_, double z_loss_)
    : options(std::move(options_)), z_loss(z_loss_) {
  check::non_negative(kOp, "z_loss", z_loss);
  reset();
}

void CrossEntropyLossImpl::reset() {
  // A copy: loading an archive writes into the buffer, and clone() must not share it.
  weight = register_buffer("weight", options.weight().defined() ? options.weight().clone() : torch::Tensor());
}

void CrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  stream << "allfinite::nn::CrossEntropyLoss(reduction=" << reduction_name(options.reduction())
         << ", ignore_index=" << options.ignore_index() << ", label_smoothing=" << options.label_smoothing()
         << ", z_loss=" << z_loss << ")";
}

torch::Tensor CrossEntropyLossImpl::forward(const torch::Tensor& input, const torch::Tensor& target) {
  return allfinite::cross_entropy(input, target, weight, options.ignore_index(), reduction_name(options.reduction()),
                                  options.label_smoothing(), z_loss);
}

}  // namespace allfinite::nn
