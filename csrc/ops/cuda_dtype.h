// From torch's dtypes to the CUDA kernels'.
#pragma once
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "cuda/common/dtype.h"

namespace allfinite {

inline cuda::DType cuda_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return cuda::DType::kFloat16;
    case at::kBFloat16:
      return cuda::DType::kBFloat16;
    case at::kFloat:
      return cuda::DType::kFloat32;
    default:
      TORCH_INTERNAL_ASSERT(false, "no CUDA kernel for ", dtype, "; fp64 goes through the reference");
  }
}

}  // namespace allfinite
