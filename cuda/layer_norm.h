// LayerNorm over rows on a CUDA device: arguments and launchers (what they compute: layer_norm.cuh).
// Torch-free.
//
// All tensors are contiguous; pointers need only the alignment of their element type, and the results are the
// same bits for every alignment. Launchers return before the work is done, never throw, and report a refused
// launch.
#pragma once
#include <driver_types.h>

#include <cstdint>

#include "cuda/common/dtype.h"

namespace allfinite::cuda {

// Numbers saved for each row: mean high part, mean low part, rstd, scale (fp32). They describe the row times
// `scale`, a power of two that is 1 unless the row's variance leaves fp32's range.
constexpr int kLayerNormStats = 4;

struct LayerNormForwardParams {
  const void* x;       // [rows, n], dtype
  const void* weight;  // [n], weight_dtype, or null
  const void* bias;    // [n], weight_dtype, or null
  void* y;             // [rows, n], dtype
  float* stats;        // [rows, 4]
  int64_t rows, n;
  double eps;
  DType dtype, weight_dtype;  // weight_dtype: dtype, or kFloat32
};

struct LayerNormBackwardParams {
  const void* dy;      // [rows, n], dtype
  const void* x;       // [rows, n], dtype
  const void* weight;  // [n], weight_dtype, or null
  const float* stats;  // [rows, 4]
  void* dx;            // [rows, n], dtype, or null: not wanted
  void* dweight;       // [n], dweight_dtype, or null: not wanted
  void* dbias;         // [n], dbias_dtype, or null: not wanted
  double* workspace;   // layer_norm_backward_workspace(rows, n) numbers, with dweight or dbias only
  int64_t rows, n;
  DType dtype, weight_dtype, dweight_dtype, dbias_dtype;
};

// Length of `workspace`, in doubles.
int64_t layer_norm_backward_workspace(int64_t rows, int64_t n);

// rows = 0 or n = 0: nothing is launched.
cudaError_t layer_norm_forward(const LayerNormForwardParams& params, cudaStream_t stream);

// n = 0: nothing is launched. rows = 0: dweight and dbias become 0.
cudaError_t layer_norm_backward(const LayerNormBackwardParams& params, cudaStream_t stream);

}  // namespace allfinite::cuda
