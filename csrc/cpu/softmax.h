// Softmax over rows: arguments of the CPU kernels (what they compute: softmax.cpp, softmax_backward.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

constexpr int kSoftmaxMaskDims = 16;

// A mask seen from the rows: the row's index, read as a number with the digits `size`, gives the mask's offset.
struct SoftmaxMask {
  const void* data;  // null: no mask
  bool is_bool;      // bytes, 0: masked; else numbers of `dtype` that are added
  DType dtype;
  int64_t step;  // elements between neighbours along the row; 0: one for all
  int dims;
  int64_t size[kSoftmaxMaskDims], stride[kSoftmaxMaskDims];  // outermost first
};

// Both kernels: rows of n elements, one behind the other. scratch: softmax_scratch_bytes(n) bytes, 64-byte aligned.
// Forward: a mask of fp64 needs fp64 rows.
constexpr int64_t softmax_scratch_bytes(int64_t n) {
  return 3 * ((n * 8 + 63) / 64 * 64);
}

struct SoftmaxForwardArgs {
  const void* x;   // [rows, n], dtype
  void* y;         // [rows, n], dtype
  float* weights;  // [rows, n], y before it is rounded to 16 bits, or null: not wanted
  SoftmaxMask mask;
  void* scratch;
  int64_t begin, end;  // rows to do
  int64_t n;
  double scale;
  DType dtype;
};

struct SoftmaxBackwardArgs {
  const void* dy;       // [rows, n], dtype
  const void* x;        // [rows, n], dtype
  const void* weights;  // [rows, n]: y in fp32 (fp64 for fp64)
  void* dx;             // [rows, n], dtype, or null: not wanted
  double* sums;         // [n]: the gradients of the scores of these rows are added to it, in order; or null
  SoftmaxMask mask;
  const int64_t* order;  // row number i is order[i]; null: i
  void* scratch;
  int64_t begin, end;  // rows to do
  int64_t n;
  double scale;
  DType dtype;
};

// A row of the mask's gradient: the sum over chunks, in order, and over the row where the mask has one element for all.
struct SoftmaxMaskGradientArgs {
  const double* sums;  // [chunks, n]
  void* out;           // [n], or [1] where `whole`; dtype
  int64_t chunks, n;
  int64_t step;  // elements between neighbours of `out`
  bool whole;
  DType dtype;
};

ALLFINITE_CPU_KERNEL(softmax_forward, SoftmaxForwardArgs)
ALLFINITE_CPU_KERNEL(softmax_backward, SoftmaxBackwardArgs)
ALLFINITE_CPU_KERNEL(softmax_mask_gradient, SoftmaxMaskGradientArgs)

}  // namespace allfinite::cpu
