// LayerNorm over rows: arguments of the CPU kernels (what they compute: layer_norm.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

// Per row four numbers, fp32 (fp64 for fp64): mean high part, mean low part, rstd, scale. They describe the
// row times `scale`, a power of two that is 1 unless the row's variance leaves fp32's range.
constexpr int kLayerNormStats = 4;

// Rows of the backward that are summed in one fixed chunk, whatever the number of threads (F5).
constexpr int64_t kLayerNormMaxChunks = 16;
constexpr int64_t kLayerNormMinChunkRows = 32;

struct LayerNormForwardArgs {
  const void* x;       // [rows, n], dtype
  const void* weight;  // [n], weight_dtype, or null
  const void* bias;    // [n], weight_dtype, or null
  void* y;             // [rows, n], dtype
  void* stats;         // [rows, 4]
  int64_t begin, end;  // rows to do
  int64_t n;
  double eps;
  DType dtype, weight_dtype;
};

struct LayerNormBackwardArgs {
  const void* dy;      // [rows, n], dtype
  const void* x;       // [rows, n], dtype
  const void* weight;  // [n], weight_dtype, or null
  const void* stats;   // [rows, 4]
  void* dx;            // [rows, n], dtype, or null: not wanted
  double* sums;        // [2, n], of dy * xhat and of dy over these rows, written; null: not wanted
  void* scratch;       // 2 n elements of fp32 (fp64 for fp64), with `sums` only
  int64_t begin, end;  // rows to do
  int64_t n;
  DType dtype, weight_dtype;
};

struct LayerNormColumnsArgs {
  LayerNormBackwardArgs rows;  // begin .. end: all rows
  const double* sums;          // [chunks, 2, n]
  int64_t chunks;
  void* dweight;  // [n], dweight_dtype, or null
  void* dbias;    // [n], dbias_dtype, or null
  DType dweight_dtype, dbias_dtype;
};

ALLFINITE_CPU_KERNEL(layer_norm_forward, LayerNormForwardArgs)
ALLFINITE_CPU_KERNEL(layer_norm_backward, LayerNormBackwardArgs)
ALLFINITE_CPU_KERNEL(layer_norm_columns, LayerNormColumnsArgs)

}  // namespace allfinite::cpu
