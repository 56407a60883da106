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

// Both kernels: [outer, n, inner], softmax over n; row number r is column r % inner of block r / inner. With inner = 1
// the rows lie one behind the other; else the work is cut into tiles of neighbouring columns (softmax_tile.h).
// scratch: softmax_scratch_bytes(n) bytes, tiles: 3 * softmax_tile_bytes(n, element size) where inner > 1; both 64-byte
// aligned. A mask of fp64 needs fp64 rows, but for the backward of fp32 rows.
constexpr int64_t softmax_scratch_bytes(int64_t n) {
  return 3 * ((n * 8 + 63) / 64 * 64);
}
// Columns of a tile: whole cache lines, as many as 512 KB hold, within one line and 512 bytes.
constexpr int64_t softmax_tile_columns(int64_t n, int64_t element_size) {
  const int64_t lines = 524288 / (64 * n);
  return (lines < 1 ? 1 : lines > 8 ? 8 : lines) * (64 / element_size);
}
constexpr int64_t softmax_tile_bytes(int64_t n, int64_t element_size) {
  return softmax_tile_columns(n, element_size) * element_size * n;
}
// Two numbers of a row of 16 bits, from which backward makes its weights again: what was subtracted from the scores,
// and the inverse of the sum.
struct SoftmaxRowNumbers {
  double top, inverse;
};

struct SoftmaxForwardArgs {
  const void* x;               // dtype
  void* y;                     // dtype
  SoftmaxRowNumbers* numbers;  // [rows], or null: not wanted; 16 bits only
  SoftmaxMask mask;
  void *scratch, *tiles;
  int64_t begin, end;  // rows to do; inner > 1: tiles
  int64_t n, inner;
  double scale;
  DType dtype;
};

struct SoftmaxBackwardArgs {
  const void* dy;                    // dtype
  const void* x;                     // dtype
  const void* y;                     // dtype; not read where `numbers` is
  const SoftmaxRowNumbers* numbers;  // [rows], for 16 bits
  void* dx;                          // dtype, or null: not wanted
  double* sums;  // [n]: the gradients of the scores of these rows are added to it, in order; or null. inner = 1 only
  SoftmaxMask mask;
  const int64_t* order;  // row number i is order[i]; null: i. inner = 1 only
  void *scratch, *tiles;
  int64_t begin, end;  // rows to do; inner > 1: tiles
  int64_t n, inner;
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
