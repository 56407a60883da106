// Sums and maxima: within a thread (compensated), over a warp, over a block. The order is fixed, so the bits
// are too.
#pragma once
#include "cuda/common/simt.cuh"

namespace allfinite::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// A sum of floats kept as two floats (Knuth's two-sum): about 48 bits, however long the chain, without the
// cost of double on devices where that is slow. An overflow or a NaN leaves total() not finite.
struct CompensatedSum {
  float sum = 0.0f, error = 0.0f;

  __device__ __forceinline__ void add(float value) {
    const float next = sum + value;
    const float taken = next - sum;
    error += (sum - (next - taken)) + (value - taken);
    sum = next;
  }
  __device__ __forceinline__ double total() const { return static_cast<double>(sum) + static_cast<double>(error); }
};

// Sum of a small array as a tree of halves. kCount: a power of two.
template <int kCount>
__device__ __forceinline__ float tree_sum(const float (&values)[kCount]) {
  float partial[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    partial[i] = values[i];
  }
#pragma unroll
  for (int width = kCount / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      partial[i] += partial[i + width];
    }
  }
  return partial[0];
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Shared memory of the block reductions. One object serves any number of them one after another.
struct BlockScratch {
  static constexpr int kMaxValues = 3;
  double partial[kMaxValues * kWarp];
  float4 result;
};

// Sums kValues numbers over a one-dimensional block of whole warps. One thread turns the totals into four
// floats with `finish` (so that double arithmetic on them is done once a block, not by every thread); every
// thread gets those.
template <int kValues, class Finish>
__device__ __forceinline__ float4 block_sum(const double (&values)[kValues], BlockScratch& scratch, Finish finish) {
  static_assert(kValues <= BlockScratch::kMaxValues);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const double sum = warp_sum(values[k]);
    if (lane == 0) {
      scratch.partial[k * kWarp + warp] = sum;
    }
  }
  __syncthreads();
  if (warp == 0) {
    double totals[kValues];
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      totals[k] = warp_sum(lane < warps ? scratch.partial[k * kWarp + lane] : 0.0);
    }
    if (lane == 0) {
      scratch.result = finish(totals);
    }
  }
  __syncthreads();  // `partial` may be written again after this, and `result` after the next call's first
                    // barrier
  return scratch.result;
}

// The largest value over the block, NaN ignored.
__device__ __forceinline__ float block_max(float value, BlockScratch& scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_max(value);
  if (lane == 0) {
    scratch.partial[warp] = static_cast<double>(value);
  }
  __syncthreads();
  if (warp == 0) {
    const float largest = warp_max(static_cast<float>(scratch.partial[lane < warps ? lane : 0]));
    if (lane == 0) {
      scratch.result.x = largest;
    }
  }
  __syncthreads();
  return scratch.result.x;
}

}  // namespace allfinite::cuda
