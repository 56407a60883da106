// Normalization over the last dimensions. Part of allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

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

// input / sqrt(mean(input^2) + eps) * weight over the last dimensions, as torch::rms_norm.
//
// input, weight, dtypes, range, NaN, errors and derivatives: as layer_norm. eps absent: the machine epsilon of fp32
// (fp64 for fp64). A row of zeros with eps 0 gives output and gradient 0.
ALLFINITE_API at::Tensor rms_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                  const std::optional<at::Tensor>& weight = {}, std::optional<double> eps = {});

// residual_out = input + residual, and layer_norm or rms_norm of the stored residual_out, in one pass:
// (output, residual_out).
//
// residual: input's shape (it is not broadcast) and dtype, or fp32 beside a 16-bit input, which keeps a residual stream
// beyond fp16's range finite. residual_out: residual's dtype, the fp32 (fp64) sum rounded once; where that overflows it
// is infinite, as the sum is, and its row of the norm NaN. output: input's dtype. Both are contiguous and
// differentiable, and either may go unused: the gradients of input and residual are the norm's plus residual_out's,
// added in fp32 (fp64) and rounded once to each dtype. Errors, also for a residual of another shape (c10::ValueError)
// or dtype (c10::TypeError), and all else: as layer_norm and rms_norm.
ALLFINITE_API std::tuple<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& input, const at::Tensor& residual,
                                                                at::IntArrayRef normalized_shape,
                                                                const std::optional<at::Tensor>& weight = {},
                                                                const std::optional<at::Tensor>& bias = {},
                                                                double eps = 1e-5);
ALLFINITE_API std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                                              at::IntArrayRef normalized_shape,
                                                              const std::optional<at::Tensor>& weight = {},
                                                              std::optional<double> eps = {});

}  // namespace allfinite
