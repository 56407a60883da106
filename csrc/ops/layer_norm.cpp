// layer_norm: check, autograd, double backward, meta, CPU glue, C++ function. CUDA glue: layer_norm_cuda.cpp.
// Autocast: none is registered, because statistics are fp32 for every dtype; 16-bit input stays 16-bit.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <vector>

#include "allfinite/ops/norms.h"
#include "ops/check.h"
#include "ops/cpu_dtype.h"
#include "ops/norm_affine.h"
#include "ops/norm_cpu.h"
#include "ops/op.h"
#include "ops/op_node.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::layer_norm";
constexpr int kStats = cpu::norm_stats(/*rms=*/false);

// --- check ---------------------------------------------------------------------------------------------------------

void check_parameter(const char* name, const OptionalTensor& parameter, const Tensor& input,
                     c10::SymIntArrayRef shape) {
  if (!parameter) {
    return;
  }
  check::strided(kOp, name, *parameter);
  check::same_device(kOp, name, *parameter, "input", input);
  TORCH_CHECK_VALUE(parameter->sym_sizes() == shape, kOp, ": expected ", name, " of shape ", shape, ", but got ",
                    parameter->sym_sizes());
  const auto dtype = parameter->scalar_type();
  const bool wide_beside_16_bits =
      dtype == at::kFloat && (input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16);
  TORCH_CHECK_TYPE(dtype == input.scalar_type() || wide_beside_16_bits, kOp, ": expected ", name, " of input's dtype, ",
                   input.scalar_type(), ", or float32 beside a 16-bit input, but got ", dtype);
}

void check_arguments(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps) {
  check::floating(kOp, "input", input);
  check::strided(kOp, "input", input);
  TORCH_CHECK_VALUE(!shape.empty(), kOp, ": expected normalized_shape of at least one dimension, but got []");
  const bool fits =
      input.dim() >= static_cast<int64_t>(shape.size()) && input.sym_sizes().slice(input.dim() - shape.size()) == shape;
  TORCH_CHECK_VALUE(fits, kOp, ": expected input to end in normalized_shape ", shape, ", but got input of shape ",
                    input.sym_sizes());
  check_parameter("weight", weight, input, shape);
  check_parameter("bias", bias, input, shape);
  check::non_negative(kOp, "eps", eps);
}

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
  check_arguments(input, normalized_shape, weight, bias, eps);
  return std::get<0>(call_forward(input, weight, bias, static_cast<int64_t>(normalized_shape.size()), eps));
}

// --- autograd ------------------------------------------------------------------------------------------------------

// The same gradients as differentiable torch expressions, in fp32 (fp64): what create_graph=True needs.
variable_list reference_backward(const Tensor& grad, const variable_list& saved, int64_t ndim, double eps,
                                 const std::vector<bool>& needs) {
  const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
  const auto compute = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<int64_t> inner, outer;
  for (int64_t d = 0; d < input.dim(); ++d) {
    (d < input.dim() - ndim ? outer : inner).push_back(d);
  }
  const auto row_mean = [&](const Tensor& t) { return t.mean(inner, /*keepdim=*/true); };
  const auto over_rows = [&](const Tensor& t) { return outer.empty() ? t : t.sum(outer); };

  const Tensor x = input.to(compute), dy = grad.to(compute);
  const Tensor centred = x - row_mean(x);
  const Tensor rstd = (row_mean(centred * centred) + eps).rsqrt();
  const Tensor xhat = centred * rstd;
  const Tensor g = weight.defined() ? dy * weight.to(compute) : dy;
  variable_list result(3);
  if (needs[0]) {
    result[0] = (rstd * (g - row_mean(g) - xhat * row_mean(g * xhat))).to(input.scalar_type());
  }
  if (needs[1]) {
    result[1] = over_rows(dy * xhat).to(weight.scalar_type());
  }
  if (needs[2]) {
    result[2] = over_rows(dy).to(bias.scalar_type());
  }
  return result;
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
  auto stats_shape = input.sym_sizes().slice(0, input.dim() - ndim).vec();
  stats_shape.emplace_back(kStats);
  const auto stats_dtype = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {at::empty_symint(input.sym_sizes(), input.options()),
          at::empty_symint(stats_shape, input.options().dtype(stats_dtype))};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, const Tensor&, int64_t,
                                                 std::array<bool, 3> output_mask) {
  const auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {output_mask[0] ? like(input) : Tensor(), output_mask[1] && weight ? like(*weight) : Tensor(),
          output_mask[2] && bias ? like(*bias) : Tensor()};
}

// --- CPU -----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_cpu(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                       int64_t ndim, double eps) {
  auto [output, stats] = forward_meta(input, weight, bias, ndim, eps);
  if (input.numel() == 0) {
    stats.zero_();
    return {output, stats};
  }
  const int64_t rows = stats.numel() / kStats;
  const Tensor x = input.contiguous();
  const Affine affine(input, weight, bias);
  cpu::NormForwardArgs args{};
  args.x = x.const_data_ptr();
  args.weight = Affine::pointer(affine.weight);
  args.bias = Affine::pointer(affine.bias);
  args.y = output.data_ptr();
  args.stats = stats.data_ptr();
  args.n = input.numel() / rows;
  args.eps = eps;
  args.dtype = cpu_dtype(input.scalar_type());
  args.weight_dtype = cpu_dtype(affine.dtype);
  run_norm_forward(args, rows);
  return {output, stats};
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                                const OptionalTensor& bias, const Tensor& stats, int64_t ndim,
                                                std::array<bool, 3> output_mask) {
  auto [dx, dweight, dbias] = backward_meta(grad, input, weight, bias, stats, ndim, output_mask);
  if (input.numel() == 0) {
    for (const Tensor& t : {dweight, dbias}) {
      if (t.defined()) {
        t.zero_();
      }
    }
    return {dx, dweight, dbias};
  }
  const int64_t rows = stats.numel() / kStats;
  const Tensor dy = grad.to(input.scalar_type()).contiguous(), x = input.contiguous();
  const Tensor saved_stats = stats.contiguous();
  const Affine affine(input, weight, std::nullopt);
  cpu::NormBackwardArgs args{};
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.weight = Affine::pointer(affine.weight);
  args.stats = saved_stats.const_data_ptr();
  args.dx = dx.defined() ? dx.data_ptr() : nullptr;
  args.n = input.numel() / rows;
  args.dtype = cpu_dtype(input.scalar_type());
  args.weight_dtype = cpu_dtype(affine.dtype);
  args.x_dtype = args.dtype;
  run_norm_backward(args, rows, dweight, dbias);
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
