// Argument rules that several ops share, so that each is written, and worded, once.
// Every message: "<op>: expected <what>, but got <what came>".
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace allfinite::check {

using at::Tensor;

// None from Python, an undefined tensor from C++.
inline void defined(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_TYPE(t.defined(), op, ": expected ", name, " to be a tensor, but got none");
}

// fp16, bf16, fp32 or fp64.
inline void floating(const char* op, const char* name, const Tensor& t) {
  defined(op, name, t);
  const auto dtype = t.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble, op,
                   ": expected ", name, " to be float16, bfloat16, float32 or float64, but got ", dtype);
}

inline void same_device(const char* op, const char* name, const Tensor& t, const char* as_name, const Tensor& as) {
  TORCH_CHECK(t.device() == as.device(), op, ": expected ", name, " on the device of ", as_name, ", ", as.device(),
              ", but got ", t.device());
}

inline void strided(const char* op, const char* name, const Tensor& t) {
  defined(op, name, t);
  TORCH_CHECK_NOT_IMPLEMENTED(!t.is_nested(), op, ": expected ", name,
                              " to be a dense (strided) tensor, but got a nested one");
  TORCH_CHECK_NOT_IMPLEMENTED(t.layout() == at::kStrided, op, ": expected ", name,
                              " to be a dense (strided) tensor, but got layout ", t.layout());
}

inline void non_negative(const char* op, const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0 && std::isfinite(value), op, ": expected ", name, " >= 0 and finite, but got ", value);
}

}  // namespace allfinite::check
