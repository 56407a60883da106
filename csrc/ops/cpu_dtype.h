// From torch's dtypes to the CPU kernels'.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "cpu/dtype.h"

namespace allfinite {

inline cpu::DType cpu_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return cpu::DType::kFloat16;
    case at::kBFloat16:
      return cpu::DType::kBFloat16;
    case at::kFloat:
      return cpu::DType::kFloat32;
    case at::kDouble:
      return cpu::DType::kFloat64;
    default:
      TORCH_INTERNAL_ASSERT(false, "no CPU kernel for ", dtype, "; the op's checks should have said so");
  }
}

}  // namespace allfinite
