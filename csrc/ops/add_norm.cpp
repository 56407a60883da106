// add_layer_norm and add_rms_norm, (input, residual) -> (norm of the sum, the sum): check, autograd, double backward,
// meta, CPU glue, C++ functions. Both are one pair of inner ops with a flag.
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

const char* op_name(bool rms) {
  return rms ? "allfinite::add_rms_norm" : "allfinite::add_layer_norm";
}

// --- the two inner ops, through the dispatcher ---------------------------------------------------------------------

using Outputs = std::tuple<Tensor, Tensor>;                    // output, residual_out
using Results = std::tuple<Tensor, Tensor, Tensor>;            // and the statistics
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // of input, residual, weight, bias
using Mask = std::array<bool, 4>;

using Forward = Results(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, double,
                        bool);
using Backward = Gradients(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                           const OptionalTensor&, const Tensor&, int64_t, bool, Mask);

Results call_forward(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                     const OptionalTensor& bias, int64_t ndim, double eps, bool rms) {
  static const auto op = find_op<Forward>("allfinite::_add_norm_forward");
  return op.call(input, residual, weight, bias, ndim, eps, rms);
}

Outputs composite(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& given_weight, const OptionalTensor& given_bias, std::optional<double> given_eps,
                  bool rms) {
  const char* op = op_name(rms);
  const OptionalTensor weight = or_none(given_weight), bias = or_none(given_bias);
  check::norm_input(op, input, normalized_shape);
  check::norm_residual(op, residual, input);
  check::norm_parameter(op, "weight", weight, input, normalized_shape);
  check::norm_parameter(op, "bias", bias, input, normalized_shape);
  const double eps = given_eps.value_or(default_rms_eps(input));
  check::non_negative(op, "eps", eps);
  auto [output, sum, stats] =
      call_forward(input, residual, weight, bias, static_cast<int64_t>(normalized_shape.size()), eps, rms);
  return {output, sum};
}

Outputs add_layer_norm_composite(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return composite(input, residual, normalized_shape, weight, bias, eps, /*rms=*/false);
}

Outputs add_rms_norm_composite(const Tensor& input, const Tensor& residual, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, std::optional<double> eps) {
  return composite(input, residual, normalized_shape, weight, std::nullopt, eps, /*rms=*/true);
}

// --- autograd ------------------------------------------------------------------------------------------------------

// What is known at the forward, and what each backward needs.
struct Setting {
  int64_t ndim;
  double eps;
  bool rms;
  at::ScalarType input_dtype;
};

// Only the sum's gradient came: both terms get it, and the norm is not touched.
variable_list sum_backward(const Tensor& grad_sum, const Setting& setting, const std::vector<bool>& needs) {
  return {needs[0] ? grad_sum.to(setting.input_dtype) : Tensor(), needs[1] ? grad_sum : Tensor(), Tensor(), Tensor()};
}

// What create_graph=True needs. `sum` depends on input and residual through the node itself.
variable_list reference_backward(const Tensor& grad, const Tensor& grad_sum, const variable_list& saved,
                                 const Setting& setting, const std::vector<bool>& needs) {
  const Tensor &sum = saved[0], &weight = saved[1], &bias = saved[2];
  auto wide = reference::differentiable_gradients(grad, sum, or_none(weight), setting.ndim, setting.eps, setting.rms,
                                                  {needs[0] || needs[1], needs[2], needs[3]});
  if (wide.dx.defined() && grad_sum.defined()) {
    wide.dx = wide.dx + grad_sum;
  }
  return {needs[0] ? wide.dx.to(setting.input_dtype) : Tensor(), needs[1] ? wide.dx.to(sum.scalar_type()) : Tensor(),
          needs[2] ? wide.dweight.to(weight.scalar_type()) : Tensor(),
          needs[3] ? wide.dbias.to(bias.scalar_type()) : Tensor()};
}

variable_list kernel_backward(const Tensor& grad, const Tensor& grad_sum, const variable_list& saved,
                              const Setting& setting, const std::vector<bool>& needs) {
  const Tensor &sum = saved[0], &weight = saved[1], &bias = saved[2], &stats = saved[3];
  // In one dtype the two gradients are the same numbers: one tensor, asked for once.
  const bool same = sum.scalar_type() == setting.input_dtype;
  const Mask mask{needs[0] || (same && needs[1]), needs[1] && !same, needs[2], needs[3]};
  static const auto op = find_op<Backward>("allfinite::_add_norm_backward");
  auto [dinput, dresidual, dweight, dbias] =
      op.call(grad, or_none(grad_sum), sum, or_none(weight), or_none(bias), stats, setting.ndim, setting.rms, mask);
  return {needs[0] ? dinput : Tensor(), same && needs[1] ? dinput : dresidual, dweight, dbias};
}

Results forward_autograd(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                         const OptionalTensor& bias, int64_t ndim, double eps, bool rms) {
  const bool sum_is_differentiable = torch::autograd::compute_requires_grad(input, residual);
  const auto run = [&]() -> variable_list {
    auto [output, sum, stats] = call_forward(input, residual, weight, bias, ndim, eps, rms);
    return {output, sum, stats};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    return {{outputs[1], sum_is_differentiable}, {or_undefined(weight)}, {or_undefined(bias)}, {outputs[2]}};
  };
  const Setting setting{ndim, eps, rms, input.scalar_type()};
  const auto backward = [setting](const variable_list& grads, const variable_list& saved,
                                  const std::vector<bool>& needs) -> variable_list {
    const Tensor &grad = grads[0], grad_sum = grads.size() > 1 ? grads[1] : Tensor();
    if (!grad.defined()) {
      return sum_backward(grad_sum, setting, needs);
    }
    return at::GradMode::is_enabled() ? reference_backward(grad, grad_sum, saved, setting, needs)
                                      : kernel_backward(grad, grad_sum, saved, setting, needs);
  };
  auto outputs = differentiable(op_name(rms), {input, residual, or_undefined(weight), or_undefined(bias)},
                                sum_is_differentiable ? 2 : 1, run, save, backward);
  return {outputs[0], outputs[1], outputs[2]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

Results forward_meta(const Tensor& input, const Tensor& residual, const OptionalTensor&, const OptionalTensor&,
                     int64_t ndim, double, bool rms) {
  return {empty_like_contiguous(input), empty_like_contiguous(residual), empty_norm_stats(input, ndim, rms)};
}

Gradients backward_meta(const Tensor& grad, const OptionalTensor&, const Tensor& sum, const OptionalTensor& weight,
                        const OptionalTensor& bias, const Tensor&, int64_t, bool, Mask output_mask) {
  return {output_mask[0] ? empty_like_contiguous(grad) : Tensor(),
          output_mask[1] ? empty_like_contiguous(sum) : Tensor(),
          output_mask[2] && weight ? empty_like_contiguous(*weight) : Tensor(),
          output_mask[3] && bias ? empty_like_contiguous(*bias) : Tensor()};
}

// --- CPU -----------------------------------------------------------------------------------------------------------

Results forward_cpu(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                    const OptionalTensor& bias, int64_t ndim, double eps, bool rms) {
  auto [output, sum, stats] = forward_meta(input, residual, weight, bias, ndim, eps, rms);
  norm_forward_cpu({.input = input,
                    .residual = residual,
                    .weight = weight,
                    .bias = bias,
                    .eps = eps,
                    .rms = rms,
                    .output = output,
                    .sum = sum,
                    .stats = stats});
  return {output, sum, stats};
}

Gradients backward_cpu(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& sum,
                       const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& stats, int64_t ndim,
                       bool rms, Mask output_mask) {
  check::dtype_beside(op_name(rms), "residual_out", sum, grad);  // grad has the input's dtype
  auto [dinput, dresidual, dweight, dbias] =
      backward_meta(grad, grad_sum, sum, weight, bias, stats, ndim, rms, output_mask);
  // In one dtype there is one gradient, and the node asks for one. Whoever asks for both gets two tensors.
  const bool same = sum.scalar_type() == grad.scalar_type();
  norm_backward_cpu({.grad = grad,
                     .grad_sum = grad_sum ? grad_sum->to(sum.scalar_type()) : Tensor(),
                     .x = sum,
                     .weight = weight,
                     .stats = stats,
                     .rms = rms,
                     .dx = same && !dinput.defined() ? dresidual : dinput,
                     .dresidual = same ? Tensor() : dresidual,
                     .dweight = dweight,
                     .dbias = dbias});
  if (same && dinput.defined() && dresidual.defined()) {
    dresidual.copy_(dinput);
  }
  return {dinput, dresidual, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("add_layer_norm", add_layer_norm_composite);
  m.impl("add_rms_norm", add_rms_norm_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_add_norm_forward", forward_autograd);
  m.impl("_add_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_add_norm_forward", forward_meta);
  m.impl("_add_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_add_norm_forward", forward_cpu);
  m.impl("_add_norm_backward", backward_cpu);
}

Outputs add_layer_norm(const Tensor& input, const Tensor& residual, at::IntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  using Op =
      Outputs(const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, const OptionalTensor&, double);
  static const auto op = find_op<Op>("allfinite::add_layer_norm");
  return op.call(input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, bias, eps);
}

Outputs add_rms_norm(const Tensor& input, const Tensor& residual, at::IntArrayRef normalized_shape,
                     const OptionalTensor& weight, std::optional<double> eps) {
  using Op = Outputs(const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&, std::optional<double>);
  static const auto op = find_op<Op>("allfinite::add_rms_norm");
  return op.call(input, residual, c10::fromIntArrayRefSlow(normalized_shape), weight, eps);
}

}  // namespace allfinite
