// LayerNorm forward kernel: y = (x - mean) / sqrt(var + eps) * weight + bias, one block a row.
//
// Bytes: x read and y written once in memory, 2 b per element (the second and third pass over a row hit L1 or
// L2), and 16 bytes of statistics a row. Launches: 1. Floor: copy bandwidth. Accumulation: compensated fp32
// sums along a thread, double across the block; one thread of the block does the double arithmetic on the
// totals. y is rounded once, from fp32.
//
// Mean: a compensated sum of every element gives it to about 46 bits, kept as two floats. xhat = ((x -
// mean_hi) - mean_lo) * rstd is then right to a few units in its own last place, also where x lies close to
// the mean, and the error does not grow with mean / std. Variance: a second pass over the same differences.
//
// Range: where var is not finite, or var + eps < 2^-100 so that squares underflow, or the whole row lies so low
// that its deviations do, the row is done again times a power of two, with eps times its square. NaN and infinity: that
// row becomes NaN, no other row is touched. var + eps = 0 (a constant row with eps 0): rstd is stored as 0, so that y =
// bias and dx = 0.
//
// Compiled by nvcc 13.0 for sm_75, sm_80 and sm_90: 40 to 59 registers, 784 bytes of shared memory, no spills.
//
// The number of threads and the order of every sum depend on n and the dtype only (F5).
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/common/reduce.cuh"
#include "cuda/common/simt.cuh"
#include "cuda/common/vector.cuh"
#include "cuda/layer_norm.h"

namespace allfinite::cuda {

constexpr int kRowThreads = 256;  // at most; fewer for short rows

struct RowStats {
  float mean_hi, mean_lo, rstd, scale;
};

__device__ __forceinline__ float centred(float x, const RowStats& stats) {
  return (x * stats.scale - stats.mean_hi) - stats.mean_lo;
}
__device__ __forceinline__ float normalized(float x, const RowStats& stats) {
  return centred(x, stats) * stats.rstd;
}

// visit(i, valid) for this thread's groups of kGroup elements: i the first, valid how many are inside the
// row.
template <int kGroup, class Visit>
__device__ __forceinline__ void for_each_group(int64_t n, Visit visit) {
  const int64_t step = static_cast<int64_t>(blockDim.x) * kGroup;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kGroup; i < n; i += step) {
    visit(i, n - i < kGroup ? static_cast<int>(n - i) : kGroup);
  }
}

// kGroup elements of a parameter vector; `otherwise` where there is none.
template <bool kVector, class W, int kGroup>
__device__ __forceinline__ void load_parameter(float (&out)[kGroup], const W* parameter, int64_t i, int valid,
                                               float otherwise) {
  if (parameter) {
    load_floats<kVector>(out, parameter + i, valid);
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      out[j] = otherwise;
    }
  }
}

constexpr double kSmallestVariance = 0x1p-100;
// Below this mean the deviations may be subnormal and lose digits, also where eps hides the variance; beside an
// eps of 1 and more, such rows are 0 in any case.
constexpr float kSmallestMean = 0x1p-100f;

// The statistics of the row times `scale`. The result's scale is 0 where var or var + eps is out of range.
template <bool kVector, class X>
__device__ RowStats scaled_row_stats(const X* x, int64_t n, double eps, float scale, BlockScratch& scratch) {
  constexpr int kGroup = Pack<X>::kSize;
  CompensatedSum sum;
  for_each_group<kGroup>(n, [&](int64_t i, int valid) {
    float v[kGroup];
    load_floats<kVector>(v, x + i, valid);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      sum.add(v[j] * scale);
    }
  });
  const double sums[1] = {sum.total()};
  const float4 mean = block_sum(sums, scratch, [n](const double (&total)[1]) {
    const double value = total[0] / static_cast<double>(n);
    const float high = static_cast<float>(value);
    return make_float4(high, static_cast<float>(value - static_cast<double>(high)), 0, 0);
  });
  const RowStats centre{mean.x, mean.y, 0.0f, scale};

  CompensatedSum squares;
  for_each_group<kGroup>(n, [&](int64_t i, int valid) {
    float v[kGroup];
    load_floats<kVector>(v, x + i, valid);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float d = j < valid ? centred(v[j], centre) : 0.0f;
      v[j] = d * d;
    }
    squares.add(tree_sum(v));
  });
  const double moments[1] = {squares.total()};
  const float4 spread = block_sum(moments, scratch, [=](const double (&total)[1]) {
    const double variance = total[0] / static_cast<double>(n);
    const double denominator = variance + eps * static_cast<double>(scale) * static_cast<double>(scale);
    const double rstd = denominator == 0 ? 0 : 1 / sqrt(denominator);
    // Beyond fp32 only for a constant row with an eps below 2^-254; its xhat must be 0, not 0 * inf.
    const float rounded_rstd = rstd > FLT_MAX ? FLT_MAX : static_cast<float>(rstd);
    const bool small_is_exact = fabsf(mean.x) >= kSmallestMean || eps >= 1;
    const double smallest = small_is_exact ? denominator : variance;
    const bool in_range = variance <= DBL_MAX && smallest >= kSmallestVariance;
    return make_float4(rounded_rstd, in_range ? scale : 0.0f, 0, 0);
  });
  return {mean.x, mean.y, spread.x, spread.y};
}

// A power of two that brings the row's largest magnitude near 1; 1 where there is none or it is infinite.
template <bool kVector, class X>
__device__ float rescue_scale(const X* x, int64_t n, BlockScratch& scratch) {
  constexpr int kGroup = Pack<X>::kSize;
  float largest = 0.0f;
  for_each_group<kGroup>(n, [&](int64_t i, int valid) {
    float v[kGroup];
    load_floats<kVector>(v, x + i, valid);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      largest = fmaxf(largest, fabsf(v[j]));
    }
  });
  largest = block_max(largest, scratch);
  if (!(largest > 0.0f && largest <= FLT_MAX)) {
    return 1.0f;
  }
  const int exponent = -ilogbf(largest);
  return ldexpf(1.0f, exponent < -126 ? -126 : exponent > 126 ? 126 : exponent);
}

// A function of its own, kept out of line: it is rare, and inlined it would cost the ordinary row registers.
template <bool kVector, class X>
__device__ __noinline__ RowStats rescued_row_stats(const X* x, int64_t n, double eps, BlockScratch& scratch) {
  const float scale = rescue_scale<kVector>(x, n, scratch);
  RowStats stats = scaled_row_stats<kVector>(x, n, eps, scale, scratch);
  stats.scale = scale;
  return stats;
}

// Grid: any number of blocks, each takes rows blockIdx.x, blockIdx.x + gridDim.x, ... Block: whole warps.
template <bool kVector, class X, class W>
__global__ void __launch_bounds__(kRowThreads) layer_norm_forward_kernel(const LayerNormForwardParams p) {
  constexpr int kGroup = Pack<X>::kSize;
  ALLFINITE_SHARED(BlockScratch, scratch, );
  const W* weight = static_cast<const W*>(p.weight);
  const W* bias = static_cast<const W*>(p.bias);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const X* x = static_cast<const X*>(p.x) + row * p.n;
    X* y = static_cast<X*>(p.y) + row * p.n;
    RowStats stats = scaled_row_stats<kVector>(x, p.n, p.eps, 1.0f, scratch);
    if (stats.scale == 0.0f) {
      stats = rescued_row_stats<kVector>(x, p.n, p.eps, scratch);
    }
    for_each_group<kGroup>(p.n, [&](int64_t i, int valid) {
      float v[kGroup], g[kGroup], b[kGroup];
      load_floats<kVector>(v, x + i, valid);
      load_parameter<kVector>(g, weight, i, valid, 1.0f);
      load_parameter<kVector>(b, bias, i, valid, 0.0f);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        v[j] = fmaf(normalized(v[j], stats), g[j], b[j]);
      }
      store_floats<kVector>(y + i, v, valid);
    });
    if (threadIdx.x == 0) {
      float* saved = p.stats + row * kLayerNormStats;
      saved[0] = stats.mean_hi;
      saved[1] = stats.mean_lo;
      saved[2] = stats.rstd;
      saved[3] = stats.scale;
    }
  }
}

}  // namespace allfinite::cuda
