// CUDA's names for a host compiler, on top of the SIMT layer. Kernels reach this file through common/simt.cuh
// only.
//
// Differences from a device that tests must allow for: the host rounds rsqrt and division exactly, and adds
// nothing to a product without being told to (kernels are compiled with --fmad=false, so this one is no
// difference).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <type_traits>

#include "layer/runtime.h"

// The toolkit's headers define these to nothing for a host compiler. `__shared__` is made an error, because a
// plain static would be shared by all blocks and out of the sanitizers' sight.
#undef __shared__
#define __shared__ use_ALLFINITE_SHARED_instead
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__

#define ALLFINITE_SHARED(type, name, dims) \
  static const char name##_key = 0;        \
  using name##_type = type dims;           \
  auto& name = ::allfinite::simt::shared_variable<name##_type>(&name##_key)

#define threadIdx (::allfinite::simt::current->thread)
#define blockIdx (::allfinite::simt::current->block)
#define blockDim (::allfinite::simt::current->block_dim)
#define gridDim (::allfinite::simt::current->grid_dim)

// The caller's file and line. Two plain default arguments: g++ 12 takes the declaration's line for a braced
// one.
#define ALLFINITE_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(ALLFINITE_CALLER) {
  allfinite::simt::block_barrier(0, allfinite::simt::Reduction::kCount, {file, line});
}
inline int __syncthreads_count(int predicate, ALLFINITE_CALLER) {
  return allfinite::simt::block_barrier(predicate, allfinite::simt::Reduction::kCount, {file, line});
}
inline int __syncthreads_and(int predicate, ALLFINITE_CALLER) {
  return allfinite::simt::block_barrier(predicate, allfinite::simt::Reduction::kAnd, {file, line});
}
inline int __syncthreads_or(int predicate, ALLFINITE_CALLER) {
  return allfinite::simt::block_barrier(predicate, allfinite::simt::Reduction::kOr, {file, line});
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, ALLFINITE_CALLER) {
  allfinite::simt::warp_rendezvous(mask, allfinite::simt::WarpOp::kSyncwarp, nullptr, 0, {file, line});
}
inline uint32_t __activemask() {
  return allfinite::simt::live_lanes();
}
inline void __threadfence() {
  allfinite::simt::memory_fence();
}

// A source outside the lane's segment of `width` lanes means the lane's own value.
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, ALLFINITE_CALLER) {
  const int base = static_cast<int>(allfinite::simt::current->lane) & ~(width - 1);
  return allfinite::simt::shuffle(mask, value, base | (source & (width - 1)), {file, line});
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, ALLFINITE_CALLER) {
  const int lane = static_cast<int>(allfinite::simt::current->lane), source = lane ^ bits;
  return allfinite::simt::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, {file, line});
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, ALLFINITE_CALLER) {
  const int lane = static_cast<int>(allfinite::simt::current->lane), source = lane + static_cast<int>(delta);
  return allfinite::simt::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, {file, line});
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, ALLFINITE_CALLER) {
  const int lane = static_cast<int>(allfinite::simt::current->lane), source = lane - static_cast<int>(delta);
  return allfinite::simt::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, {file, line});
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, ALLFINITE_CALLER) {
  unsigned char vote = predicate != 0;
  auto* slots = allfinite::simt::warp_rendezvous(mask, allfinite::simt::WarpOp::kVote, &vote, 1, {file, line});
  uint32_t result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0) {
      allfinite::simt::read_slot(&vote, slots, lane, 1);
      result |= static_cast<uint32_t>(vote) << lane;
    }
  }
  return result;
}
inline int __any_sync(uint32_t mask, int predicate, ALLFINITE_CALLER) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, ALLFINITE_CALLER) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}

// Relaxed, as on a device: they order no other access.
template <class T>
T atomicAdd(T* address, T value) {
  static_assert(std::is_integral_v<T>, "a floating-point atomic would make results depend on the order of threads");
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline float rsqrtf(float value) {
  return 1.0f / std::sqrt(value);
}
