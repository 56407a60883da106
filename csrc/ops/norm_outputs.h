// Shapes and dtypes of what the norms return, on any device, meta too; and rms_norm's default eps.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <limits>

#include "cpu/norm.h"
#include "ops/op.h"

namespace allfinite {

inline Tensor empty_like_contiguous(const Tensor& t) {
  return at::empty_symint(t.sym_sizes(), t.options());
}

// The statistics of each row: [..., numbers a row], fp32 (fp64 for fp64).
inline Tensor empty_norm_stats(const Tensor& input, int64_t ndim, bool rms) {
  auto shape = input.sym_sizes().slice(0, input.dim() - ndim).vec();
  shape.emplace_back(cpu::norm_stats(rms));
  const auto dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty_symint(shape, input.options().dtype(dtype));
}

// The machine epsilon of the arithmetic, as torch: fp32's for 16 bits too.
inline double default_rms_eps(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                            : std::numeric_limits<float>::epsilon();
}

}  // namespace allfinite
