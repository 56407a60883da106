// softmax: check, autograd, double backward, meta, C++ function. CPU glue: softmax_cpu.cpp.
// Autocast: none is registered, because the arithmetic is fp32 for every dtype; 16-bit input stays 16-bit.
#include "ops/softmax.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "allfinite/ops/softmax.h"
#include "ops/check.h"
#include "ops/op.h"
#include "ops/op_node.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::softmax";

// --- check ---------------------------------------------------------------------------------------------------------

void check_mask(const Tensor& mask, const Tensor& input) {
  check::strided(kOp, "mask", mask);
  check::same_device(kOp, "mask", mask, "input", input);
  if (mask.scalar_type() != at::kBool) {
    TORCH_CHECK_TYPE(at::isFloatingType(mask.scalar_type()), kOp,
                     ": expected mask to be bool (True: takes part) or floating (added), but got ", mask.scalar_type());
    check::floating(kOp, "mask", mask);
  }
  const int64_t missing = input.dim() - mask.dim();
  bool fits = missing >= 0;
  for (int64_t d = 0; fits && d < mask.dim(); ++d) {
    fits = mask.sym_size(d) == 1 || mask.sym_size(d) == input.sym_size(d + missing);
  }
  TORCH_CHECK_VALUE(fits, kOp, ": expected mask to broadcast to input's shape, ", input.sym_sizes(), ", but got ",
                    mask.sym_sizes());
}

void check_arguments(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale) {
  check::floating(kOp, "input", input);
  check::strided(kOp, "input", input);
  const int64_t rank = std::max<int64_t>(input.dim(), 1);
  TORCH_CHECK_INDEX(dim >= -rank && dim < rank, kOp, ": expected dim in [", -rank, ", ", rank - 1, "], but got ", dim);
  if (mask) {
    check_mask(*mask, input);
  }
  TORCH_CHECK_VALUE(std::isfinite(scale), kOp, ": expected a finite scale, but got ", scale);
}

// --- the two inner ops, through the dispatcher: mask has as many dimensions as input, dim >= 0
// ------------------------

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, int64_t, double, bool);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, int64_t,
                                            double, std::array<bool, 2>);

std::tuple<Tensor, Tensor> call_forward(const Tensor& input, const OptionalTensor& mask, int64_t dim, double scale,
                                        bool keep_numbers) {
  static const auto op = find_op<Forward>("allfinite::_softmax_forward");
  return op.call(input, mask, dim, scale, keep_numbers);
}

Tensor softmax_composite(const Tensor& input, int64_t dim, const OptionalTensor& given_mask, double scale) {
  OptionalTensor mask = or_none(given_mask);
  check_arguments(input, dim, mask, scale);
  const int64_t rank = std::max<int64_t>(input.dim(), 1);
  while (mask && mask->dim() < rank) {
    mask = mask->unsqueeze(0);
  }
  dim = dim < 0 ? dim + rank : dim;
  if (input.dim() == 0) {
    return std::get<0>(call_forward(input.unsqueeze(0), mask, dim, scale, false)).squeeze(0);
  }
  return std::get<0>(call_forward(input, mask, dim, scale, false));
}

// --- autograd ------------------------------------------------------------------------------------------------------

// The same gradients as differentiable torch expressions, in fp64: what create_graph=True needs. Masked weights and
// what lies beneath a mask are chosen to be 0, as in the kernels.
variable_list reference_backward(const Tensor& grad, const variable_list& saved, int64_t dim, double scale,
                                 const std::vector<bool>& needs) {
  const Tensor &input = saved[0], &mask = saved[1];
  const Tensor zero = at::zeros({}, input.options().dtype(at::kDouble));
  const double infinity = std::numeric_limits<double>::infinity();
  Tensor scores = input.to(at::kDouble) * scale;
  Tensor hidden;
  if (mask.defined() && mask.scalar_type() == at::kBool) {
    hidden = mask.logical_not().logical_or(scores == -infinity);
  } else if (mask.defined()) {
    const Tensor bias = mask.to(at::kDouble);
    scores = scores + bias;
    hidden = (bias == -infinity).logical_or(scores == -infinity);
  } else {
    hidden = scores == -infinity;
  }
  // A row of nothing but masked scores is left as zeros, so that its softmax is finite.
  const Tensor kept = at::where(hidden.all(dim, /*keepdim=*/true), zero, at::where(hidden, zero - infinity, scores));
  const Tensor y = at::where(hidden, zero, at::softmax(kept, dim));
  const Tensor dy = at::where(hidden, zero, grad.to(at::kDouble));
  const Tensor ds = y * (dy - (y * dy).sum(dim, /*keepdim=*/true));
  variable_list result(2);
  if (needs[0]) {
    result[0] = (ds * scale).to(input.scalar_type());
  }
  if (needs[1]) {
    result[1] = ds.sum_to_size_symint(mask.sym_sizes()).to(mask.scalar_type());
  }
  return result;
}

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& input, const OptionalTensor& mask, int64_t dim, double scale,
                                            bool keep_numbers) {
  const bool keep = keep_numbers || torch::autograd::compute_requires_grad(input, or_undefined(mask));
  const auto run = [&]() -> variable_list {
    auto [output, numbers] = call_forward(input, mask, dim, scale, keep);
    return {output, numbers};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    const bool separate = softmax_rows::is_narrow(input);
    return {{input}, {or_undefined(mask)}, {outputs[separate ? 1 : 0], /*output=*/!separate}};
  };
  const auto backward = [dim, scale](const variable_list& grads, const variable_list& saved,
                                     const std::vector<bool>& needs) -> variable_list {
    if (at::GradMode::is_enabled()) {
      return reference_backward(grads[0], saved, dim, scale, needs);
    }
    static const auto op = find_op<Backward>("allfinite::_softmax_backward");
    auto [dx, dmask] = op.call(grads[0], saved[0], or_none(saved[1]), saved[2], dim, scale, {needs[0], needs[1]});
    return {dx, dmask};
  };
  auto outputs = differentiable(kOp, {input, or_undefined(mask)}, 1, run, save, backward);
  return {outputs[0], outputs[1]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const OptionalTensor&, int64_t dim, double,
                                        bool keep_numbers) {
  return softmax_rows::outputs_like(input, dim, keep_numbers);
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& input, const OptionalTensor& mask, const Tensor&,
                                         int64_t, double, std::array<bool, 2> output_mask) {
  return softmax_rows::gradients_like(input, mask, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("softmax", softmax_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_softmax_forward", forward_autograd);
  m.impl("_softmax_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_softmax_forward", forward_meta);
  m.impl("_softmax_backward", backward_meta);
}

Tensor softmax(const Tensor& input, int64_t dim, const OptionalTensor& mask, double scale) {
  static const auto op = find_op<Tensor(const Tensor&, int64_t, const OptionalTensor&, double)>("allfinite::softmax");
  return op.call(input, dim, mask, scale);
}

}  // namespace allfinite
