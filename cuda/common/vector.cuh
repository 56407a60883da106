// Loads and stores of small groups of elements, converted to and from fp32 on the way.
//
// kVector: 16-byte accesses; the address must be a multiple of 16 and the whole group valid. Otherwise
// elements are moved one by one, and only the first `valid` of them. Both leave the same values in the same
// places, so a kernel's results do not depend on the alignment of its pointers.
#pragma once
#include "cuda/common/simt.cuh"

namespace allfinite::cuda {

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// To nearest even; beyond the range of T to infinity; NaN stays NaN.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <class T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  T values[kSize];
};

// Elements past `valid` are 0.
template <bool kVector, class T, int kCount>
__device__ __forceinline__ void load_floats(float (&out)[kCount], const T* address, int valid) {
  if constexpr (kVector) {
    static_assert(kCount % Pack<T>::kSize == 0);
#pragma unroll
    for (int i = 0; i < kCount; i += Pack<T>::kSize) {
      const Pack<T> pack = simt::load_vector<Pack<T>>(address + i);
#pragma unroll
      for (int j = 0; j < Pack<T>::kSize; ++j) {
        out[i + j] = to_float(pack.values[j]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[i] = i < valid ? to_float(address[i]) : 0.0f;
    }
  }
}

template <bool kVector, class T, int kCount>
__device__ __forceinline__ void store_floats(T* address, const float (&in)[kCount], int valid) {
  if constexpr (kVector) {
    static_assert(kCount == Pack<T>::kSize);
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      pack.values[i] = from_float<T>(in[i]);
    }
    simt::store_vector(address, pack);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < valid) {
        address[i] = from_float<T>(in[i]);
      }
    }
  }
}

}  // namespace allfinite::cuda
