// LayerNorm's two inner ops as torch expressions: what fp64 on CUDA runs. Statistics as the kernels': mean high part,
// mean low part, rstd, scale (always 1 here: fp64 has range to spare).
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <tuple>
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
  Tensor over_rows(const Tensor& t) const { return outer.empty() ? t : t.sum(outer); }
  std::vector<int64_t> inner, outer;
};

inline std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& input, const OptionalTensor& weight,
                                                     const OptionalTensor& bias, int64_t ndim, double eps) {
  const NormDims dims(input, ndim);
  const Tensor mean = dims.row_mean(input);
  const Tensor deviation = input - mean;
  const Tensor mean_low = dims.row_mean(deviation);
  const Tensor centred = deviation - mean_low;
  const Tensor denominator = dims.row_mean(centred * centred) + eps;
  const Tensor rstd = at::where(denominator == 0, at::zeros_like(denominator), denominator.rsqrt());
  Tensor output = centred * rstd;
  if (weight) {
    output = output * *weight;
  }
  if (bias) {
    output = output + *bias;
  }
  auto stats_shape = input.sizes().slice(0, dims.outer.size()).vec();
  const Tensor stats = at::stack({mean, mean_low, rstd, at::ones_like(rstd)}, -1);
  stats_shape.push_back(4);
  return {output.contiguous(), stats.reshape(stats_shape)};
}

inline std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& input,
                                                              const OptionalTensor& weight, const OptionalTensor& bias,
                                                              const Tensor& stats, int64_t ndim,
                                                              std::array<bool, 3> output_mask) {
  const NormDims dims(input, ndim);
  const auto statistic = [&](int64_t which) {
    Tensor value = stats.select(-1, which);
    for (int64_t d = 0; d < ndim; ++d) {
      value = value.unsqueeze(-1);
    }
    return value;
  };
  const Tensor rstd = statistic(2);
  const Tensor xhat = ((input - statistic(0)) - statistic(1)) * rstd;
  Tensor dx, dweight, dbias;
  if (output_mask[0]) {
    const Tensor g = weight ? grad * *weight : grad;
    dx = (rstd * (g - dims.row_mean(g) - xhat * dims.row_mean(g * xhat))).contiguous();
  }
  if (output_mask[1] && weight) {
    dweight = dims.over_rows(grad * xhat);
  }
  if (output_mask[2] && bias) {
    dbias = dims.over_rows(grad);
  }
  return {dx, dweight, dbias};
}

}  // namespace allfinite::reference
