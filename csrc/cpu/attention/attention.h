// Scaled dot product attention: arguments of the CPU kernels (what they compute: forward.cpp, backward.cpp,
// backward_rows.cpp, backward_mask.cpp). Torch-free.
//
// All arithmetic is in the accumulate type A: fp32, or fp64 for fp64 tensors. Every tensor is first packed: widened to
// A once, times a power of two that keeps products inside A's range, in rows or in transposed tiles of keys.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

constexpr int64_t kAttentionKeys = 128;        // keys in a tile: the unit of the online softmax, so part of the result
constexpr int64_t kAttentionChunkTiles = 4;    // tiles of keys whose share of dQ is one sum, so part of the result
constexpr int64_t kAttentionRows = 96;         // most query rows in a tile: no part of the result
constexpr int64_t kAttentionRowAlign = 12;     // packed rows are padded to a multiple (of every register block)
constexpr int64_t kAttentionColumnAlign = 16;  // packed columns, and the keys of a transposed tile

// A [batch, heads, rows, columns] tensor whose last dimension is contiguous; strides in elements, 0 allowed.
struct AttentionTensor {
  const void* data;
  int64_t batch, head, row;
  DType dtype;
};

// What a packed slice holds beside the usual; kernels skip what it rules out.
constexpr uint8_t kAttentionNonFinite = 1;  // a row with a NaN or an infinity
constexpr uint8_t kAttentionScaled = 2;     // an exponent that is not 0

// Slices [first, first + as many as were allocated) of a tensor, packed. Slice: one (batch, head).
struct AttentionPacked {
  void* row_major;      // A [slices, padded_rows, padded_columns], or null; rows that hold a NaN or infinity are zeros
  void* transposed;     // A [slices, tiles, columns, tile_width], or null; NaN and infinity as they are
  uint8_t* non_finite;  // [slices, padded_rows]: the row holds a NaN or an infinity
  uint8_t* state;       // [slices]: kAttentionNonFinite | kAttentionScaled
  int32_t* exponents;   // stored value = value * 2^-exponent; [slices, padded_rows], or [slices] if not per_row
  void* largest;        // A [slices]: largest finite magnitude as stored; only if not per_row
  int64_t heads, rows, columns, padded_rows, padded_columns, tile_width;
  int64_t first;
  bool per_row;
};

struct AttentionPackArgs {
  AttentionTensor source;
  AttentionPacked packed;
  int64_t begin, end;  // slices to do
};

struct AttentionProblem {
  int64_t batch, heads, kv_heads, queries, keys, depth, value_depth;
  DType dtype;
  double scale, softcap;  // softcap 0: none
  int64_t left, right;    // key j takes part in row i where -left <= j - i <= right
  const void* mask;       // null: none
  bool mask_is_bool;      // true: takes part; else added
  DType mask_dtype;
  int64_t mask_stride[4];  // batch, head, row, key; in elements, 0 where broadcast
  double dropout_p;
  uint64_t seed;
  AttentionPacked query, key, value, grad;  // key.exponents and value.exponents: one a slice
};

// Per row of the statistics, numbers of A: the largest score / 4 (-inf: no key takes part), 1 / sum of
// exp(score - largest), negative where one key alone has weight, and the output before it was rounded, in the units of
// the packed values.
constexpr int64_t kAttentionStats = 2;

struct AttentionForwardArgs {
  AttentionProblem problem;
  AttentionTensor value;  // as given, for its rows that are not finite
  void* output;           // [batch, heads, queries, value_depth], dtype
  void* lse;              // A [batch, heads, queries]
  void* stats;            // A [batch, heads, queries, kAttentionStats + value_depth]
  void* scratch;  // A [kAttentionRows * (kAttentionKeys + value.padded_columns) + 2 * kAttentionKeys + value columns]
  int64_t begin, end;  // tasks to do: (batch, head, tile of kAttentionRows)
};

// Per row of `delta`: the sum of P dP minus grad_lse, then grad_lse, both in the row's unit; then e: this unit is 2^e
// times that of dP as the packed dO and V give it (the sum of their exponents). e is not 0 only where the gradient of
// lse is far larger than dP, or both are small.
constexpr int64_t kAttentionDelta = 3;

struct AttentionDeltaArgs {
  AttentionProblem problem;
  const void* stats;
  const void* grad_lse;  // A [batch, heads, queries], or null
  void* delta;           // A [batch, heads, queries, kAttentionDelta], written; and kAttentionScaled in grad.state
  int64_t begin, end;    // slices (batch, head) to do
};

struct AttentionBackwardArgs {
  AttentionProblem problem;
  AttentionTensor query, key, grad;  // as given, for their rows that are not finite
  const void* stats;
  const void* delta;
  void* grad_key;    // [batch, kv_heads, keys, depth], dtype, or null
  void* grad_value;  // [batch, kv_heads, keys, value_depth], dtype, or null
  void* query_sums;  // A [heads / kv_heads, query.padded_rows, query.padded_columns], or null; these tiles' share of dQ
  void* scratch;     // A [attention_backward_scratch(problem)]
  int64_t slice;     // (batch, kv_head)
  int64_t begin, end;  // tiles of kAttentionKeys to do
};

constexpr int64_t attention_backward_scratch(const AttentionProblem& p) {
  const int64_t matrices = 3 * (kAttentionRows + 1) * kAttentionKeys, columns = p.query.padded_columns;
  return matrices + 2 * kAttentionKeys + (kAttentionKeys + 2 * kAttentionRowAlign) * (columns + p.grad.padded_columns);
}

// dQ of rows [begin, end) of each head of one (batch, kv_head): the parts added to the first in order, then written.
struct AttentionQueryGradArgs {
  AttentionProblem problem;
  const void* delta;
  void* parts;         // A [count, heads / kv_heads, query.padded_rows, query.padded_columns]
  int64_t count;       // of parts
  void* grad_query;    // [batch, heads, queries, depth], dtype; null: only add
  int64_t slice;       // (batch, kv_head)
  int64_t begin, end;  // rows to do
};

struct AttentionMaskGradArgs {
  AttentionProblem problem;
  const void* stats;
  const void* delta;
  void* grad_mask;       // [mask_size...], mask_dtype
  int64_t mask_size[4];  // each 1 or the full size
  void* scratch;         // A [attention_backward_scratch(problem)]
  double* sums;          // [kAttentionRows, keys]
  int64_t begin, end;    // tasks to do: (mask batch, mask head, tile of kAttentionRows) of `tasks`
  int64_t tasks[3];      // batch, head, tile: each the full number, or 1 where the mask's gradient is a sum over it
};

ALLFINITE_CPU_KERNEL(attention_pack, AttentionPackArgs)
ALLFINITE_CPU_KERNEL(attention_forward, AttentionForwardArgs)
ALLFINITE_CPU_KERNEL(attention_delta, AttentionDeltaArgs)
ALLFINITE_CPU_KERNEL(attention_backward, AttentionBackwardArgs)
ALLFINITE_CPU_KERNEL(attention_query_grad, AttentionQueryGradArgs)
ALLFINITE_CPU_KERNEL(attention_mask_grad, AttentionMaskGradArgs)

}  // namespace allfinite::cpu
