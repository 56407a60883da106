// Losses. Part of allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "allfinite/export.h"

namespace allfinite {

// -sum over classes of q * log softmax(input), as torch::cross_entropy_loss, with z_loss * lse^2 added.
//
// input: (C), (N, C) or (N, C, d1, ...), logits, fp16, bf16, fp32 or fp64. target: class indices, int64 or uint8, of
// input's shape without C; or class probabilities, floating, of input's shape. weight: (C), absent, of input's dtype,
// or fp32 beside 16 bits. With label smoothing s: q = weight * ((1 - s) * target + s / C) for probabilities; for an
// index t (1 - s) * weight[t] on t, and s / C * weight on every class. z_loss: times lse^2, lse = log sum exp(input),
// and times weight[t]. Rows of target ignore_index (indices only) are not read: loss and gradient 0, whatever they
// hold. reduction: none, mean (over the weights of the counted targets; probabilities: over all rows) or sum.
//
// Result: fp32 (fp64 for fp64), computed in fp32 with sums in double. The gradient is of input's dtype, multiplied by
// the incoming one in fp32 and rounded once. Mean over no counted target: NaN, gradients 0. A row with NaN or +inf, or
// of -inf only, is NaN. Mass on a -inf class gives +inf and finite gradients; no mass on one gives nothing. Finite
// logits give finite results wherever these are in range. Errors, before anything is written: c10::TypeError (dtypes),
// c10::ValueError (shapes, label_smoothing, reduction), c10::IndexError (a class outside [0, C)),
// c10::NotImplementedError (layout, gradient of weight), c10::Error (device). Double backward works; forward-mode
// differentiation raises NotImplementedError.
ALLFINITE_API at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                       const std::optional<at::Tensor>& weight = {}, int64_t ignore_index = -100,
                                       std::string_view reduction = "mean", double label_smoothing = 0.0,
                                       double z_loss = 0.0);

}  // namespace allfinite
