// LayerNorm's two inner ops as torch expressions: what fp64 on CUDA runs. Statistics as the kernels': mean high part,
// mean low part, rstd, scale (always 1 here: fp64 has range to spare).
#pragma once
#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include "ops/norm_reference.h"
#include "ops/op.h"

namespace allfinite::reference {

inline std::tuple<Tensor, Tensor> layer_norm_forward(const Tensor& input, const OptionalTensor& weight,
                                                     const OptionalTensor& bias, int64_t ndim, double eps) {
  const NormDims dims(input, ndim);
  const Tensor mean = dims.row_mean(input);
  const Tensor deviation = input - mean;
  const Tensor mean_low = dims.row_mean(deviation);
  const Tensor centred = deviation - mean_low;
  const Tensor rstd = reciprocal_root(dims.row_mean(centred * centred), eps);
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
  const auto [dx, dweight, dbias] = gradients(dims, grad, {xhat, rstd}, weight, /*rms=*/false,
                                              {output_mask[0], output_mask[1] && weight, output_mask[2] && bias});
  return {dx.defined() ? dx.contiguous() : dx, dweight, dbias};
}

}  // namespace allfinite::reference
