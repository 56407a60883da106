// AllFinite's ops as modules for torch::nn models.
#pragma once
#include <torch/arg.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/loss.h>
#include <torch/nn/options/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "allfinite/export.h"

namespace allfinite::nn {

// torch::nn::LayerNorm with allfinite::layer_norm inside: the same options, defaults, initialisation (weight 1,
// bias 0) and names in an archive, so that either loads what the other saved.
//
// forward: [..., *normalized_shape] to the same shape and dtype. Parameters may stay fp32 while the input is
// 16-bit. NaN, infinities, rows of any magnitude and errors: see allfinite::layer_norm. Errors of the
// constructor: c10::ValueError for an empty normalized_shape, a size < 0, or eps < 0 or not finite.
class ALLFINITE_API LayerNormImpl : public torch::nn::Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(std::vector<int64_t> normalized_shape)
      : LayerNormImpl(torch::nn::LayerNormOptions(std::move(normalized_shape))) {}
  explicit LayerNormImpl(torch::nn::LayerNormOptions options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor forward(const torch::Tensor& input);

  torch::nn::LayerNormOptions options;
  torch::Tensor weight;  // undefined without elementwise_affine
  torch::Tensor bias;
};
TORCH_MODULE(LayerNorm);

// LibTorch has no RMSNorm of its own; these are the arguments and defaults of torch.nn.RMSNorm in Python.
struct ALLFINITE_API RMSNormOptions {
  explicit RMSNormOptions(std::vector<int64_t> normalized_shape) : normalized_shape_(std::move(normalized_shape)) {}

  TORCH_ARG(std::vector<int64_t>, normalized_shape);
  TORCH_ARG(std::optional<double>, eps) = std::nullopt;  // nullopt: the machine epsilon of fp32 (fp64 for fp64)
  TORCH_ARG(bool, elementwise_affine) = true;
};

// torch.nn.RMSNorm with allfinite::rms_norm inside: one parameter, weight, that starts as 1.
//
// forward: [..., *normalized_shape] to the same shape and dtype. The weight may stay fp32 while the input is 16-bit.
// NaN, infinities, rows of any magnitude and errors: see allfinite::rms_norm. Errors of the constructor:
// c10::ValueError for an empty normalized_shape, a size < 0, or eps < 0 or not finite.
class ALLFINITE_API RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(std::vector<int64_t> normalized_shape)
      : RMSNormImpl(RMSNormOptions(std::move(normalized_shape))) {}
  explicit RMSNormImpl(RMSNormOptions options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor forward(const torch::Tensor& input);

  RMSNormOptions options;
  torch::Tensor weight;  // undefined without elementwise_affine
};
TORCH_MODULE(RMSNorm);

// torch::nn::CrossEntropyLoss with allfinite::cross_entropy inside: the same options, and the same name, "weight", in
// an archive; z_loss as an argument of its own (>= 0).
//
// forward: logits (C), (N, C) or (N, C, d1, ...) and class indices or probabilities to the loss, fp32 (fp64 for fp64).
// NaN, infinities, ignored rows and errors: see allfinite::cross_entropy.
class ALLFINITE_API CrossEntropyLossImpl : public torch::nn::Cloneable<CrossEntropyLossImpl> {
 public:
  explicit CrossEntropyLossImpl(torch::nn::CrossEntropyLossOptions options = {}, double z_loss = 0.0);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  torch::Tensor forward(const torch::Tensor& input, const torch::Tensor& target);

  torch::nn::CrossEntropyLossOptions options;
  double z_loss;
  torch::Tensor weight;  // a buffer; undefined without weights
};
TORCH_MODULE(CrossEntropyLoss);

}  // namespace allfinite::nn
