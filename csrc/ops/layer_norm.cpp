// layer_norm: check, autograd, double backward, meta, CPU glue, C++ function. CUDA glue: layer_norm_cuda.cpp.
// Autocast: none is registered, because statistics are fp32 for every dtype; 16-bit input stays 16-bit.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
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

constexpr char kOp[] = "allfinite::layer_norm";

// --- the two inner ops, through the dispatcher ---------------------------------------------------------------------

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t,
                                           double);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, const Tensor&, int64_t, std::array<bool, 3>);

std::tuple<Tensor, Tensor> call_forward(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                        int64_t ndim, double eps) {
  static const auto op = find_op<Forward>("allfinite::_layer_norm_forward");
  return op.call(input, weight, bias, ndim, eps);
}

Tensor layer_norm_composite(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const OptionalTensor& given_weight, const OptionalTensor& given_bias, double eps) {
  const OptionalTensor weight = or_none(given_weight), bias = or_none(given_bias);
  check::norm_input(kOp, input, normalized_shape);
  check::norm_parameter(kOp, "weight", weight, input, normalized_shape);
  check::norm_parameter(kOp, "bias", bias, input, normalized_shape);
  check::non_negative(kOp, "eps", eps);
  return std::get<0>(call_forward(input, weight, bias, static_cast<int64_t>(normalized_shape.size()), eps));
}

// --- autograd ------------------------------------------------------------------------------------------------------

// What create_graph=True needs.
variable_list reference_backward(const Tensor& grad, const variable_list& saved, int64_t ndim, double eps,
                                 const std::vector<bool>& needs) {
  const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
  const auto wide = reference::differentiable_gradients(grad, input, or_none(weight), ndim, eps, /*rms=*/false,
                                                        {needs[0], needs[1], needs[2]});
  return {needs[0] ? wide.dx.to(input.scalar_type()) : Tensor(),
          needs[1] ? wide.dweight.to(weight.scalar_type()) : Tensor(),
          needs[2] ? wide.dbias.to(bias.scalar_type()) : Tensor()};
}

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& input, const OptionalTensor& weight,
                                            const OptionalTensor& bias, int64_t ndim, double eps) {
  const auto run = [&]() -> variable_list {
    auto [output, stats] = call_forward(input, weight, bias, ndim, eps);
    return {output, stats};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    return {{input}, {or_undefined(weight)}, {or_undefined(bias)}, {outputs[1]}};
  };
  const auto backward = [ndim, eps](const variable_list& grads, const variable_list& saved,
                                    const std::vector<bool>& needs) -> variable_list {
    if (at::GradMode::is_enabled()) {
      return reference_backward(grads[0], saved, ndim, eps, needs);
    }
    static const auto op = find_op<Backward>("allfinite::_layer_norm_backward");
    auto [dx, dweight, dbias] = op.call(grads[0], saved[0], or_none(saved[1]), or_none(saved[2]), saved[3], ndim,
                                        {needs[0], needs[1], needs[2]});
    return {dx, dweight, dbias};
  };
  auto outputs = differentiable(kOp, {input, or_undefined(weight), or_undefined(bias)}, 1, run, save, backward);
  return {outputs[0], outputs[1]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const OptionalTensor&, const OptionalTensor&, int64_t ndim,
                                        double) {
  return {empty_like_contiguous(input), empty_norm_stats(input, ndim, /*rms=*/false)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, const Tensor&, int64_t,
                                                 std::array<bool, 3> output_mask) {
  return {output_mask[0] ? empty_like_contiguous(input) : Tensor(),
          output_mask[1] && weight ? empty_like_contiguous(*weight) : Tensor(),
          output_mask[2] && bias ? empty_like_contiguous(*bias) : Tensor()};
}

// --- CPU -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                       int64_t ndim, double eps) {
  auto [output, stats] = forward_meta(input, weight, bias, ndim, eps);
  norm_forward_cpu({.input = input, .weight = weight, .bias = bias, .eps = eps, .output = output, .stats = stats});
  return {output, stats};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                                const OptionalTensor& bias, const Tensor& stats, int64_t ndim,
                                                std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = backward_meta(grad, input, weight, bias, stats, ndim, output_mask);
  norm_backward_cpu({.grad = grad.to(input.scalar_type()),
                     .x = input,
                     .weight = weight,
                     .stats = stats,
                     .dx = dx,
                     .dweight = dweight,
                     .dbias = dbias});
  return {dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", layer_norm_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_layer_norm_forward", forward_autograd);
  m.impl("_layer_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_layer_norm_forward", forward_meta);
  m.impl("_layer_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_layer_norm_forward", forward_cpu);
  m.impl("_layer_norm_backward", backward_cpu);
}

Tensor layer_norm(const Tensor& input, at::IntArrayRef normalized_shape, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps) {
  static const auto op =
      find_op<Tensor(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double)>(
          "allfinite::layer_norm");
  return op.call(input, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, eps);
}

}  // namespace allfinite
