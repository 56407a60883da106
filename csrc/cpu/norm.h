// The norms over rows (layer_norm, rms_norm, and both after a residual sum): arguments of the CPU kernels. What they
// compute: norm_forward.cpp, norm_backward.cpp. Torch-free; csrc/ops/norm_cpu.h runs them in parallel.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

// Per row, in fp32 (fp64 for fp64), what backward needs. layer_norm: mean high part, mean low part, rstd, scale;
// rms_norm: rstd, scale. They describe the row times `scale`, a power of two that is 1 unless squares leave the range
// (or -exponent, where rstd is beyond the type: RowStats in norm_row.h).
constexpr int norm_stats(bool rms) {
  return rms ? 2 : 4;
}

// Rows of the backward that are summed in one fixed chunk, whatever the number of threads (F5).
constexpr int64_t kNormMaxChunks = 16;
constexpr int64_t kNormMinChunkRows = 32;

// Rows that go through a kernel together. More would share loads of the weight, but they do not stay in the cache.
constexpr int kNormBlockRows = 2;

// Bytes of `scratch`, for one thread.
constexpr int64_t norm_row_bytes(int64_t n, DType dtype) {
  return (n * (dtype == DType::kFloat64 ? 8 : 4) + 63) / 64 * 64;
}
constexpr int64_t norm_forward_scratch(int64_t n, DType dtype) {
  return (2 + 2 * kNormBlockRows) * norm_row_bytes(n, dtype);  // weight, bias, rescued rows and sums of a block
}
constexpr int64_t norm_backward_scratch(int64_t n, DType dtype) {
  return 5 * norm_row_bytes(n, dtype);  // weight, column sums, g and xhat of a row out of range
}

struct NormForwardArgs {
  const void* x;         // [rows, n], dtype
  const void* residual;  // [rows, n], residual_dtype, or null
  void* sum;             // [rows, n], residual_dtype, with `residual`: x + residual, rounded; its norm is taken
  const void* weight;    // [n], weight_dtype, or null
  const void* bias;      // [n], weight_dtype, or null
  void* y;               // [rows, n], dtype
  void* stats;           // [rows, norm_stats(rms)]
  void* scratch;         // norm_forward_scratch bytes, aligned to 64
  int64_t begin, end;    // rows to do
  int64_t rows;          // of the whole tensor: says in which cache it may lie
  int64_t n;
  double eps;
  bool rms;                                   // no mean is subtracted
  DType dtype, weight_dtype, residual_dtype;  // the last two: dtype, or fp32 beside a 16-bit dtype
};

struct NormBackwardArgs {
  const void* dy;      // [rows, n], dtype
  const void* x;       // [rows, n], x_dtype: what was normalised (the stored sum, where there was a residual)
  const void* weight;  // [n], weight_dtype, or null
  const void* stats;   // [rows, norm_stats(rms)]
  const void* dsum;    // [rows, n], x_dtype, or null: a gradient of x that is added before the one rounding
  void* dx;            // [rows, n], dtype, or null: not wanted
  void* dresidual;     // [rows, n], x_dtype, or null: the same gradient, where x_dtype is not dtype
  double* sums;        // [2, n], of dy * xhat and of dy over these rows, written; null: not wanted
  void* scratch;       // norm_backward_scratch bytes, aligned to 64
  int64_t begin, end;  // rows to do
  int64_t rows;        // of the whole tensor: says in which cache it may lie
  int64_t n;
  bool rms;
  DType dtype, weight_dtype, x_dtype;  // the last two: dtype, or fp32 beside a 16-bit dtype
};

struct NormColumnsArgs {
  NormBackwardArgs rows;  // begin .. end: all rows
  const double* sums;     // [chunks, 2, n]
  int64_t chunks;
  void* dweight;  // [n], dweight_dtype, or null
  void* dbias;    // [n], dbias_dtype, or null
  DType dweight_dtype, dbias_dtype;
};

ALLFINITE_CPU_KERNEL(norm_forward, NormForwardArgs)
ALLFINITE_CPU_KERNEL(norm_backward, NormBackwardArgs)
ALLFINITE_CPU_KERNEL(norm_columns, NormColumnsArgs)

}  // namespace allfinite::cpu
