// Softmax. Part of allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "allfinite/export.h"

namespace allfinite {

// softmax(input * scale + mask) over dimension dim, as torch::softmax, with a mask and a contract.
//
// input: any shape, fp16, bf16, fp32 or fp64; dim in [-ndim, ndim). mask: absent, or broadcasts to input's shape
// without enlarging it. bool: true takes part. fp16, bf16, fp32 or fp64, whatever input's dtype: added after the scale;
// -inf masks, and a finite value never does; differentiable. scale: finite, of any sign, 0. Result: shape and dtype of
// input, rounded once from fp32 (fp64) arithmetic; contiguous.
//
// Scores of any magnitude are right, also where scale * input or the sum with the mask leaves fp32's range. A score of
// -inf is masked: weight 0 and gradient 0, whatever lies beneath the mask or arrives as its gradient. A row in which
// nothing takes part: 0. A NaN or +inf score that takes part makes its row NaN (what is masked stays 0). Backward is
// linear in the gradient bit for bit under powers of two; the same bits with any number of threads. Errors:
// c10::TypeError (dtype), c10::IndexError (dim), c10::ValueError (mask's shape, scale), c10::NotImplementedError
// (layout, forward-mode differentiation), c10::Error (device). Double backward works.
ALLFINITE_API at::Tensor softmax(const at::Tensor& input, int64_t dim, const std::optional<at::Tensor>& mask = {},
                                 double scale = 1.0);

}  // namespace allfinite
