// Argument rules of the gradient ops, for every backend.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "ops/check.h"

namespace allfinite::check {

// Every entry: strided, of a floating or complex dtype, on `device`, that of the argument `device_of`.
inline void gradients(const char* op, const char* name, at::TensorList tensors, const char* device_of,
                      c10::Device device) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& t = tensors[i];
    TORCH_CHECK_TYPE(t.defined(), op, ": expected ", name, "[", i, "] to be a tensor, but got none");
    TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op, ": expected ", name, "[", i,
                                "] to be a dense (strided) tensor, but got layout ", t.layout(),
                                "; pass the values of its coalesced form");
    const auto dtype = c10::toRealValueType(t.scalar_type());
    TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble, op,
                     ": expected ", name, "[", i, "] to be floating-point or complex, but got ", t.scalar_type());
    TORCH_CHECK(t.device() == device, op, ": expected ", name, "[", i, "] on the device of ", device_of, ", ", device,
                ", but got ", t.device());
  }
}

// A tensor of one element, of one dtype: scale, found_inf, growth_tracker.
inline void one_number(const char* op, const char* name, const Tensor& t, at::ScalarType dtype) {
  strided(op, name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, op, ": expected ", name, " to be ", dtype, ", but got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.sym_numel() == 1, op, ": expected ", name, " of one element, but got shape ", t.sym_sizes());
}

}  // namespace allfinite::check
