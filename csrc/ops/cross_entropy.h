// What the files of cross_entropy share: its options, the shapes, the signatures of the inner ops.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <tuple>

#include "ops/op.h"

namespace allfinite::cross_entropy_parts {

constexpr char kOp[] = "allfinite::cross_entropy";

// The numbers of at::Reduction.
enum Reduction : int64_t { kNone, kMean, kSum };

struct Options {
  int64_t ignore_index, reduction;
  double label_smoothing, z_loss;
};

using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor& input, const Tensor& target,
                                                   const OptionalTensor& weight, int64_t ignore_index,
                                                   int64_t reduction, double label_smoothing, double z_loss);
using Backward = std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& input, const Tensor& target,
                                            const OptionalTensor& weight, const Tensor& stats,
                                            const Tensor& denominator, int64_t ignore_index, int64_t reduction,
                                            double label_smoothing, double z_loss, std::array<bool, 2> output_mask);

// The dimension of the classes: (C), (N, C) or (N, C, d1, ...).
inline int64_t class_dim(const Tensor& input) {
  return input.dim() == 1 ? 0 : 1;
}

// A target of input's shape holds class probabilities, any other class indices.
inline bool has_probabilities(const Tensor& input, const Tensor& target) {
  return input.sym_sizes() == target.sym_sizes();
}

inline at::ScalarType compute_dtype(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// (N, C, d1, ...) without C.
inline c10::SymDimVector rows_shape(const Tensor& input) {
  c10::SymDimVector shape(input.sym_sizes().begin(), input.sym_sizes().end());
  shape.erase(shape.begin() + class_dim(input));
  return shape;
}

// The outputs of the inner ops, uninitialised: loss, statistics and denominator; the gradients, whose memory is rows of
// classes whatever the layout of input is.
std::tuple<Tensor, Tensor, Tensor> empty_forward(const Tensor& input, int64_t reduction);
std::tuple<Tensor, Tensor> empty_backward(const Tensor& input, const Tensor& target, std::array<bool, 2> output_mask);

}  // namespace allfinite::cross_entropy_parts
