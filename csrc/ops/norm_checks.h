// Argument rules of the norms, written and worded once: layer_norm, rms_norm, add_layer_norm, add_rms_norm.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include "ops/check.h"
#include "ops/op.h"

namespace allfinite::check {

// A tensor beside the input: of its dtype, or fp32 beside 16 bits.
inline void dtype_beside(const char* op, const char* name, const Tensor& t, const Tensor& input) {
  const auto dtype = t.scalar_type();
  const bool wide_beside_16_bits =
      dtype == at::kFloat && (input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16);
  TORCH_CHECK_TYPE(dtype == input.scalar_type() || wide_beside_16_bits, op, ": expected ", name, " of input's dtype, ",
                   input.scalar_type(), ", or float32 beside a 16-bit input, but got ", dtype);
}

// `shape`: what input ends in.
inline void norm_input(const char* op, const Tensor& input, c10::SymIntArrayRef shape) {
  floating(op, "input", input);
  strided(op, "input", input);
  TORCH_CHECK_VALUE(!shape.empty(), op, ": expected normalized_shape of at least one dimension, but got []");
  const bool fits =
      input.dim() >= static_cast<int64_t>(shape.size()) && input.sym_sizes().slice(input.dim() - shape.size()) == shape;
  TORCH_CHECK_VALUE(fits, op, ": expected input to end in normalized_shape ", shape, ", but got input of shape ",
                    input.sym_sizes());
}

// Weight or bias.
inline void norm_parameter(const char* op, const char* name, const OptionalTensor& parameter, const Tensor& input,
                           c10::SymIntArrayRef shape) {
  if (!parameter) {
    return;
  }
  strided(op, name, *parameter);
  same_device(op, name, *parameter, "input", input);
  TORCH_CHECK_VALUE(parameter->sym_sizes() == shape, op, ": expected ", name, " of shape ", shape, ", but got ",
                    parameter->sym_sizes());
  dtype_beside(op, name, *parameter, input);
}

// The residual of the add_* norms: of input's shape, because it comes back as an output of that shape.
inline void norm_residual(const char* op, const Tensor& residual, const Tensor& input) {
  strided(op, "residual", residual);
  same_device(op, "residual", residual, "input", input);
  TORCH_CHECK_VALUE(residual.sym_sizes() == input.sym_sizes(), op, ": expected residual of input's shape, ",
                    input.sym_sizes(), ", but got ", residual.sym_sizes());
  dtype_beside(op, "residual", residual, input);
}

}  // namespace allfinite::check
