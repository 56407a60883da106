// The backward of cross_entropy as differentiable torch expressions: what create_graph=True needs.
#pragma once
#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "ops/cross_entropy.h"

namespace allfinite::cross_entropy_parts {

// Per class the mass that the target puts on it; per row its class weight, and whether it counts (undefined: all do).
struct Masses {
  Tensor mass, row_weight, counted;
};

inline Masses reference_masses(const Tensor& input, const Tensor& target, const Tensor& weight, const Options& o) {
  const int64_t dim = class_dim(input);
  const Tensor w = weight.expand_symint(input.sym_sizes()), spread = w / input.sym_size(dim) * o.label_smoothing;
  if (has_probabilities(input, target)) {
    const Tensor mass = w * (target.to(w.scalar_type()) * (1 - o.label_smoothing)) + spread;
    return {mass, at::ones_like(mass.narrow_symint(dim, 0, 1)), {}};
  }
  const Tensor t = target.to(at::kLong).reshape_symint(rows_shape(input)).unsqueeze(dim);
  const Tensor counted = t.ne(o.ignore_index);
  const Tensor index = at::where(counted, t, at::zeros_like(t));
  const Tensor row_weight = w.gather(dim, index);
  return {spread.scatter_add(dim, index, row_weight * (1 - o.label_smoothing)), row_weight, counted};
}

// The gradients of input and, with class probabilities, of target, in fp32 (fp64) arithmetic. Ignored rows are taken
// out by selection, so that nothing of theirs reaches a second derivative.
inline std::tuple<Tensor, Tensor> reference_backward(const Tensor& grad, const Tensor& input, const Tensor& target,
                                                     const OptionalTensor& weight, const Tensor& denominator,
                                                     const Options& o, bool needs_input, bool needs_target) {
  const int64_t dim = class_dim(input);
  const auto options = input.options().dtype(compute_dtype(input));
  std::vector<c10::SymInt> per_class(static_cast<size_t>(input.dim()), 1);
  per_class[static_cast<size_t>(dim)] = input.sym_size(dim);
  const Tensor w = weight ? weight->to(options.dtype()).reshape_symint(per_class) : at::ones_symint(per_class, options);

  const Masses m = reference_masses(input, target, w, o);
  const Tensor wide = input.to(options.dtype());
  const Tensor x = m.counted.defined() ? at::where(m.counted, wide, at::zeros_like(wide)) : wide;
  const Tensor g = (o.reduction == kNone ? grad.unsqueeze(dim) : grad).to(options.dtype()) / denominator;
  const Tensor log_p = x.log_softmax(dim);

  Tensor dx, dtarget;
  if (needs_input) {
    const Tensor factor = m.mass.sum(dim, true) + x.logsumexp(dim, true) * m.row_weight * (2 * o.z_loss);
    const Tensor full = g * (factor * log_p.exp() - m.mass);
    dx = (m.counted.defined() ? at::where(m.counted, full, at::zeros_like(full)) : full).to(input.scalar_type());
  }
  if (needs_target) {
    dtarget = (g * w * log_p * (o.label_smoothing - 1)).to(target.scalar_type());
  }
  return {dx, dtarget};
}

}  // namespace allfinite::cross_entropy_parts
