// The norms' gradients as torch expressions: what double backward differentiates, and what fp64 on CUDA runs.
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <vector>

#include "ops/op.h"

namespace allfinite::reference {

// The dimensions of a row, and those over rows.
struct NormDims {
  NormDims(const Tensor& input, int64_t ndim) {
    for (int64_t d = 0; d < input.dim(); ++d) {
      (d < input.dim() - ndim ? outer : inner).push_back(d);
    }
  }
  Tensor row_mean(const Tensor& t) const { return t.mean(inner, /*keepdim=*/true); }
  Tensor over_rows(const Tensor& t) const { return outer.empty() ? t.clone() : t.sum(outer); }
  std::vector<int64_t> inner, outer;
};

struct Normalized {
  Tensor xhat, rstd;
};

// 1 / sqrt(mean_square + eps), and 0 where that is 1 / 0. The inner `where` keeps its derivative finite there.
inline Tensor reciprocal_root(const Tensor& mean_square, double eps) {
  const Tensor denominator = mean_square + eps;
  const Tensor nothing = denominator == 0;
  return at::where(nothing, 0., at::where(nothing, 1., denominator).rsqrt());
}

// xhat and rstd from the rows themselves. rms: no mean is subtracted.
inline Normalized normalize(const NormDims& dims, const Tensor& x, double eps, bool rms) {
  const Tensor centred = rms ? x : x - dims.row_mean(x);
  const Tensor rstd = reciprocal_root(dims.row_mean(centred * centred), eps);
  return {centred * rstd, rstd};
}

struct NormGradients {
  Tensor dx, dweight, dbias;
};

// In the dtype of grad and xhat. wanted: dx, dweight, dbias.
inline NormGradients gradients(const NormDims& dims, const Tensor& grad, const Normalized& rows,
                               const OptionalTensor& weight, bool rms, std::array<bool, 3> wanted) {
  NormGradients result;
  if (wanted[0]) {
    const Tensor g = weight ? grad * *weight : grad;
    const Tensor along = rows.xhat * dims.row_mean(g * rows.xhat);
    result.dx = rows.rstd * (rms ? g - along : g - dims.row_mean(g) - along);
  }
  if (wanted[1]) {
    result.dweight = dims.over_rows(grad * rows.xhat);
  }
  if (wanted[2]) {
    result.dbias = dims.over_rows(grad);
  }
  return result;
}

// The gradients as differentiable expressions of grad, x and weight, in fp64: squares of fp32 stay in range there, and
// create_graph is rare enough to pay for it.
inline NormGradients differentiable_gradients(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                              int64_t ndim, double eps, bool rms, std::array<bool, 3> wanted) {
  const NormDims dims(x, ndim);
  const OptionalTensor wide = weight ? OptionalTensor(weight->to(at::kDouble)) : std::nullopt;
  return gradients(dims, grad.to(at::kDouble), normalize(dims, x.to(at::kDouble), eps, rms), wide, rms, wanted);
}

}  // namespace allfinite::reference
