// What a kernel may use of CUDA, in a form that a host compiler understands as well: the first include of
// every kernel.
//
// Under nvcc this is CUDA. Under a host compiler with ALLFINITE_SIMT_HOST the same names come from
// tests/simt/layer, which runs the kernel's own source on the CPU. Rules that keep a kernel in the common
// subset:
//   shared memory       ALLFINITE_SHARED(float, scratch, [32]);   instead of __shared__
//   16-byte accesses    simt::load_vector, simt::store_vector      (alignment is checked on the host)
//   launches            launch() of launch.cuh                     instead of <<<>>>
//   arithmetic          in float or double; half types are for storage only
#pragma once
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define ALLFINITE_SHARED(type, name, dims) __shared__ type name dims

namespace allfinite::simt {

template <class V>
__device__ __forceinline__ V load_vector(const void* address) {
  return *static_cast<const V*>(address);
}

template <class V>
__device__ __forceinline__ void store_vector(void* address, const V& value) {
  *static_cast<V*>(address) = value;
}

}  // namespace allfinite::simt
#elif defined(ALLFINITE_SIMT_HOST)
#include "layer/cuda_names.h"
#else
#error "kernels are compiled by nvcc, or by a host compiler with ALLFINITE_SIMT_HOST and tests/simt on the include path"
#endif
