// rms_norm: check, autograd, double backward, meta, CPU glue, C++ function.
// Autocast: none is registered, because statistics are fp32 for every dtype; 16-bit input stays 16-bit.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "allfinite/ops/norms.h"
#include "ops/norm_checks.h"
#include "ops/norm_outputs.h"
#include "ops/norm_reference.h"
#include "ops/norm_tensors.h"
#include "ops/op.h"
#include "ops/op_node.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::rms_norm";

// --- the two inner ops, through the dispatcher ---------------------------------------------------------------------

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, int64_t, double);
using Backward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, int64_t,
                                            std::array<bool, 2>);

std::tuple<Tensor, Tensor> call_forward(const Tensor& input, const OptionalTensor& weight, int64_t ndim, double eps) {
  static const auto op = find_op<Forward>("allfinite::_rms_norm_forward");
  return op.call(input, weight, ndim, eps);
}

Tensor rms_norm_composite(const Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& given_weight,
                          std::optional<double> eps) {
  const OptionalTensor weight = or_none(given_weight);
  check::norm_input(kOp, input, normalized_shape);
  check::norm_parameter(kOp, "weight", weight, input, normalized_shape);
  const double number = eps.value_or(default_rms_eps(input));
  check::non_negative(kOp, "eps", number);
  return std::get<0>(call_forward(input, weight, static_cast<int64_t>(normalized_shape.size()), number));
}

// --- autograd ------------------------------------------------------------------------------------------------------

// What create_graph=True needs.
variable_list reference_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, int64_t ndim,
                                 double eps, const std::vector<bool>& needs) {
  const auto wide = reference::differentiable_gradients(grad, input, or_none(weight), ndim, eps, /*rms=*/true,
                                                        {needs[0], needs[1], false});
  return {needs[0] ? wide.dx.to(input.scalar_type()) : Tensor(),
          needs[1] ? wide.dweight.to(weight.scalar_type()) : Tensor()};
}

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& input, const OptionalTensor& weight, int64_t ndim,
                                            double eps) {
  const auto run = [&]() -> variable_list {
    auto [output, stats] = call_forward(input, weight, ndim, eps);
    return {output, stats};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    return {{input}, {or_undefined(weight)}, {outputs[1]}};
  };
  const auto backward = [ndim, eps](const variable_list& grads, const variable_list& saved,
                                    const std::vector<bool>& needs) -> variable_list {
    if (at::GradMode::is_enabled()) {
      return reference_backward(grads[0], saved[0], saved[1], ndim, eps, needs);
    }
    static const auto op = find_op<Backward>("allfinite::_rms_norm_backward");
    auto [dx, dweight] = op.call(grads[0], saved[0], or_none(saved[1]), saved[2], ndim, {needs[0], needs[1]});
    return {dx, dweight};
  };
  auto outputs = differentiable(kOp, {input, or_undefined(weight)}, 1, run, save, backward);
  return {outputs[0], outputs[1]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const OptionalTensor&, int64_t ndim, double) {
  return {empty_like_contiguous(input), empty_norm_stats(input, ndim, /*rms=*/true)};
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                                         const Tensor&, int64_t, std::array<bool, 2> output_mask) {
  return {output_mask[0] ? empty_like_contiguous(input) : Tensor(),
          output_mask[1] && weight ? empty_like_contiguous(*weight) : Tensor()};
}

// --- CPU -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input, const OptionalTensor& weight, int64_t ndim, double eps) {
  auto [output, stats] = forward_meta(input, weight, ndim, eps);
  norm_forward_cpu({.input = input, .weight = weight, .eps = eps, .rms = true, .output = output, .stats = stats});
  return {output, stats};
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                        const Tensor& stats, int64_t ndim, std::array<bool, 2> output_mask) {
  auto [dx, dweight] = backward_meta(grad, input, weight, stats, ndim, output_mask);
  norm_backward_cpu({.grad = grad.to(input.scalar_type()),
                     .x = input,
                     .weight = weight,
                     .stats = stats,
                     .rms = true,
                     .dx = dx,
                     .dweight = dweight});
  return {dx, dweight};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("rms_norm", rms_norm_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_rms_norm_forward", forward_autograd);
  m.impl("_rms_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_rms_norm_forward", forward_meta);
  m.impl("_rms_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_rms_norm_forward", forward_cpu);
  m.impl("_rms_norm_backward", backward_cpu);
}

Tensor rms_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                std::optional<double> eps) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, std::optional<double>)>(
          "allfinite::rms_norm");
  return op.call(input, c10::fromIntArrayRefSlow(normalized_shape), weight, eps);
}

}  // namespace allfinite
