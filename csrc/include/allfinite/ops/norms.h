// Normalization over the last dimensions. Part of allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "allfinite/export.h"

namespace allfinite {

// (input - mean) / sqrt(var + eps) * weight + bias over the last dimensions, as torch::layer_norm.
//
// input: [..., *normalized_shape], fp16, bf16, fp32 or fp64. weight, bias: normalized_shape, each absent, of
// input's dtype, or fp32 beside a 16-bit input. Result: shape and dtype of input, rounded once from fp32
// (fp64) arithmetic; contiguous. Statistics are fp32 (fp64 for fp64), with the mean as a pair of numbers: no
// loss where mean >> std, and rows of any magnitude are right (a row whose squares leave fp32's range is
// rescaled by a power of two). A NaN or infinity makes its own row NaN. Zero variance with eps 0 gives bias,
// and gradient 0. Errors: c10::TypeError (dtype), c10::ValueError (shape, eps < 0 or not finite), c10::Error
// (device). Double backward works; forward-mode differentiation raises NotImplementedError.
ALLFINITE_API at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                    const std::optional<at::Tensor>& weight = {},
                                    const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

}  // namespace allfinite
