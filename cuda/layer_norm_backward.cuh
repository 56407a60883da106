// LayerNorm backward kernels. With g = dy * weight and xhat from the saved statistics:
//   dx = rstd * scale * (g - mean(g) - xhat * mean(g * xhat)),
//   dweight = sum over rows of dy * xhat,  dbias = sum over rows of dy.
//
// Bytes: dx 3 b per element (the second pass over a row hits L1 or L2); the column sums read dy and x once
// more, 2 b, and write and read 24 n bytes for each of at most 64 chunks of rows. Launches: 1 for dx, 2 for
// the columns. Floor: 5 b per element; a single pass over both would have 3 b.
//
// Accumulation: row sums as in the forward; column sums compensated in fp32 along a thread, in double from
// there on, added in a fixed order over a number of chunks that depends on the number of rows only (F3, F5).
// No atomics.
//
// Range: a row whose mean |g| leaves [2^-70, 2^100], or that the forward had to scale, is done with g times a
// power of two, taken back exactly at the end. The mantissas are those of the ordinary path, so the result
// stays linear in dy bit for bit (F4). A column whose sum is not finite, or whose products may underflow, is
// summed again in double. NaN and infinity: a row of dx, or a column of dweight and dbias, that they take
// part in shows them; no other.
#pragma once
#include "cuda/layer_norm.cuh"

namespace allfinite::cuda {

__device__ __forceinline__ RowStats load_stats(const float* stats, int64_t row) {
  const float* saved = stats + row * kLayerNormStats;
  return {saved[0], saved[1], saved[2], saved[3]};
}

// --- dx ------------------------------------------------------------------------------------------------------------

// g = dy * weight. When rescued, times 2^-exponent, with the same single rounding.
struct RowGradient {
  bool rescued = false;
  double factor = 1.0;  // 2^-exponent
  double undo = 1.0;    // 2^exponent

  __device__ __forceinline__ float operator()(float dy, float weight) const {
    return rescued ? static_cast<float>(static_cast<double>(dy) * static_cast<double>(weight) * factor) : dy * weight;
  }
};

struct RowMeans {
  float g, g_xhat, magnitude;  // means of g, g * xhat, |g|
};

template <bool kVector, class X, class W>
__device__ RowMeans row_means(const X* dy, const X* x, const W* weight, int64_t n, const RowStats& stats,
                              const RowGradient& gradient, BlockScratch& scratch) {
  constexpr int kGroup = Pack<X>::kSize;
  CompensatedSum sum_g, sum_gx;
  float sum_magnitude = 0.0f;
  for_each_group<kGroup>(n, [&](int64_t i, int valid) {
    float g[kGroup], gx[kGroup], v[kGroup], w[kGroup];
    load_floats<kVector>(g, dy + i, valid);
    load_floats<kVector>(v, x + i, valid);
    load_parameter<kVector>(w, weight, i, valid, 1.0f);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      g[j] = j < valid ? gradient(g[j], w[j]) : 0.0f;
      gx[j] = j < valid ? g[j] * normalized(v[j], stats) : 0.0f;
      sum_magnitude += fabsf(g[j]);
    }
    sum_g.add(tree_sum(g));
    sum_gx.add(tree_sum(gx));
  });
  const double sums[3] = {sum_g.total(), sum_gx.total(), static_cast<double>(sum_magnitude)};
  const float4 means = block_sum(sums, scratch, [n](const double (&total)[3]) {
    const double count = static_cast<double>(n);
    return make_float4(static_cast<float>(total[0] / count), static_cast<float>(total[1] / count),
                       static_cast<float>(total[2] / count), 0.0f);
  });
  return {means.x, means.y, means.z};
}

// The scaling that brings the largest |dy * weight| near 1, whatever the two factors are. Entries that are
// zero or not finite have no say.
template <bool kVector, class X, class W>
__device__ RowGradient rescued_gradient(const X* dy, const W* weight, int64_t n, BlockScratch& scratch) {
  constexpr int kGroup = Pack<X>::kSize;
  constexpr float kNone = -1000.0f;  // below every sum of two exponents
  float largest = kNone;
  for_each_group<kGroup>(n, [&](int64_t i, int valid) {
    float g[kGroup], w[kGroup];
    load_floats<kVector>(g, dy + i, valid);
    load_parameter<kVector>(w, weight, i, valid, 1.0f);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const float a = fabsf(g[j]), b = fabsf(w[j]);
      if (a > 0.0f && a <= FLT_MAX && b > 0.0f && b <= FLT_MAX) {
        largest = fmaxf(largest, static_cast<float>(ilogbf(a) + ilogbf(b)));
      }
    }
  });
  largest = block_max(largest, scratch);
  const int exponent = largest == kNone ? 0 : static_cast<int>(largest);
  return {true, ldexp(1.0, -exponent), ldexp(1.0, exponent)};
}

// Grid and block as in the forward.
template <bool kVector, class X, class W>
__global__ void __launch_bounds__(kRowThreads) layer_norm_input_gradient_kernel(const LayerNormBackwardParams p) {
  constexpr int kGroup = Pack<X>::kSize;
  ALLFINITE_SHARED(BlockScratch, scratch, );
  const W* weight = static_cast<const W*>(p.weight);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const X* dy = static_cast<const X*>(p.dy) + row * p.n;
    const X* x = static_cast<const X*>(p.x) + row * p.n;
    X* dx = static_cast<X*>(p.dx) + row * p.n;
    const RowStats stats = load_stats(p.stats, row);
    RowGradient gradient;
    RowMeans means = row_means<kVector>(dy, x, weight, p.n, stats, gradient, scratch);
    const bool in_range = (means.magnitude >= 0x1p-70f && means.magnitude <= 0x1p100f) || means.magnitude == 0.0f;
    if (!in_range || stats.scale != 1.0f) {
      gradient = rescued_gradient<kVector>(dy, weight, p.n, scratch);
      means = row_means<kVector>(dy, x, weight, p.n, stats, gradient, scratch);
    }
    // Exact in double: three factors, two of them powers of two.
    const double last_factor = static_cast<double>(stats.rstd) * static_cast<double>(stats.scale) * gradient.undo;
    for_each_group<kGroup>(p.n, [&](int64_t i, int valid) {
      float g[kGroup], v[kGroup], w[kGroup];
      load_floats<kVector>(g, dy + i, valid);
      load_floats<kVector>(v, x + i, valid);
      load_parameter<kVector>(w, weight, i, valid, 1.0f);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        const float projected = fmaf(-normalized(v[j], stats), means.g_xhat, gradient(g[j], w[j]) - means.g);
        v[j] = gradient.rescued ? static_cast<float>(static_cast<double>(projected) * last_factor)
                                : projected * stats.rstd;
      }
      store_floats<kVector>(dx + i, v, valid);
    });
  }
}

// --- dweight, dbias ------------------------------------------------------------------------------------------------

constexpr int kTileColumns = kWarp;
constexpr int kTileRows = 8;
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinChunkRows = 32;
constexpr int kColumnSums = 3;  // of dy * xhat, of dy, and the largest |dy|

__host__ __device__ __forceinline__ int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

__host__ __device__ __forceinline__ int64_t chunk_rows(int64_t rows) {
  const int64_t even = divide_up(rows, kMaxChunks);
  return even < kMinChunkRows ? kMinChunkRows : even;
}

__host__ __device__ __forceinline__ int64_t chunk_count(int64_t rows) {
  return divide_up(rows, chunk_rows(rows));
}

struct ColumnSums {
  double weight = 0.0, bias = 0.0, largest = 0.0;

  __device__ __forceinline__ void add(const ColumnSums& other) {
    weight += other.weight;
    bias += other.bias;
    largest = fmax(largest, other.largest);
  }
};

struct ColumnScratch {
  double weight[kTileRows][kTileColumns], bias[kTileRows][kTileColumns], largest[kTileRows][kTileColumns];
};

// The sums of a tile's threads with the same column, in the order of their rows, for every one of them.
__device__ __forceinline__ ColumnSums sum_tile(const ColumnSums& own, ColumnScratch& scratch) {
  scratch.weight[threadIdx.y][threadIdx.x] = own.weight;
  scratch.bias[threadIdx.y][threadIdx.x] = own.bias;
  scratch.largest[threadIdx.y][threadIdx.x] = own.largest;
  __syncthreads();
  ColumnSums total;
#pragma unroll
  for (int r = 0; r < kTileRows; ++r) {
    total.add({scratch.weight[r][threadIdx.x], scratch.bias[r][threadIdx.x], scratch.largest[r][threadIdx.x]});
  }
  __syncthreads();
  return total;
}

__device__ __forceinline__ double* column_partials(const LayerNormBackwardParams& p, int64_t chunk, int64_t column) {
  return p.workspace + chunk * kColumnSums * p.n + column;
}

// Grid: (tiles of columns, chunks of rows). Block: (kTileColumns, kTileRows).
template <class X>
__global__ void __launch_bounds__(kTileColumns* kTileRows) layer_norm_columns_kernel(const LayerNormBackwardParams p) {
  ALLFINITE_SHARED(ColumnScratch, scratch, );
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTileColumns + threadIdx.x;
  const int64_t begin = blockIdx.y * chunk_rows(p.rows);
  const int64_t end = begin + chunk_rows(p.rows) < p.rows ? begin + chunk_rows(p.rows) : p.rows;
  CompensatedSum weight, bias;
  float largest = 0.0f;
  if (column < p.n) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kTileRows) {
      const int64_t i = row * p.n + column;
      const float dy = to_float(static_cast<const X*>(p.dy)[i]);
      const float x = to_float(static_cast<const X*>(p.x)[i]);
      weight.add(dy * normalized(x, load_stats(p.stats, row)));
      bias.add(dy);
      largest = fmaxf(largest, fabsf(dy));
    }
  }
  const ColumnSums total = sum_tile({weight.total(), bias.total(), static_cast<double>(largest)}, scratch);
  if (threadIdx.y == 0 && column < p.n) {
    double* partial = column_partials(p, blockIdx.y, column);
    partial[0] = total.weight;
    partial[p.n] = total.bias;
    partial[2 * p.n] = total.largest;
  }
}

// This thread's share of a column in double: no product or sum of fp32 numbers leaves its range.
template <class X>
__device__ ColumnSums column_in_double(const LayerNormBackwardParams& p, int64_t column) {
  ColumnSums sums;
  for (int64_t row = threadIdx.y; row < p.rows; row += kTileRows) {
    const int64_t i = row * p.n + column;
    const double dy = to_float(static_cast<const X*>(p.dy)[i]);
    const float x = to_float(static_cast<const X*>(p.x)[i]);
    sums.weight += dy * static_cast<double>(normalized(x, load_stats(p.stats, row)));
    sums.bias += dy;
  }
  return sums;
}

__device__ __forceinline__ void write_column(void* out, DType dtype, int64_t column, double value) {
  const float rounded = static_cast<float>(value);
  if (dtype == DType::kFloat32) {
    static_cast<float*>(out)[column] = rounded;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(out)[column] = from_float<__half>(rounded);
  } else {
    static_cast<__nv_bfloat16*>(out)[column] = from_float<__nv_bfloat16>(rounded);
  }
}

// Grid: tiles of columns. Block: (kTileColumns, kTileRows).
template <class X>
__global__ void __launch_bounds__(kTileColumns* kTileRows)
    layer_norm_finish_columns_kernel(const LayerNormBackwardParams p) {
  constexpr double kSmallestGradient = 0x1p-90;  // below it products with a small xhat may lose bits
  ALLFINITE_SHARED(ColumnScratch, scratch, );
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTileColumns + threadIdx.x;
  ColumnSums own;
  if (column < p.n) {
    for (int64_t chunk = threadIdx.y; chunk < chunk_count(p.rows); chunk += kTileRows) {
      const double* partial = column_partials(p, chunk, column);
      own.add({partial[0], partial[p.n], partial[2 * p.n]});
    }
  }
  ColumnSums total = sum_tile(own, scratch);
  const bool finite = fabs(total.weight) <= DBL_MAX && fabs(total.bias) <= DBL_MAX;
  const bool may_underflow = total.largest > 0.0 && total.largest < kSmallestGradient;
  const bool again = column < p.n && (!finite || may_underflow);
  if (__syncthreads_or(again)) {
    const ColumnSums redone = sum_tile(again ? column_in_double<X>(p, column) : ColumnSums(), scratch);
    total = again ? redone : total;
  }
  if (threadIdx.y == 0 && column < p.n) {
    if (p.dweight) {
      write_column(p.dweight, p.dweight_dtype, column, total.weight);
    }
    if (p.dbias) {
      write_column(p.dbias, p.dbias_dtype, column, total.bias);
    }
  }
}

}  // namespace allfinite::cuda
