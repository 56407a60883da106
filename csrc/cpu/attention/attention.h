// Scaled dot product attention: arguments of the CPU kernels (what they compute: forward.cpp, backward_rows.cpp,
// backward_keys.cpp). Torch-free.
//
// All arithmetic is in the accumulate type A: fp32, or fp64 for fp64 tensors. Every tensor is first packed: widened to
// A once, times a power of two that keeps products inside A's range, in rows or in transposed tiles of keys.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

constexpr int64_t kAttentionKeys = 128;        // keys in a tile: the unit of the online softmax, so part of the result
constexpr int64_t kAttentionRows = 48;         // most query rows in a tile: no part of the result
constexpr int64_t kAttentionRowAlign = 12;     // packed rows are padded to a multiple (of every register block)
constexpr int64_t kAttentionColumnAlign = 16;  // packed columns, and the keys of a transposed tile

// A [batch, heads, rows, columns] tensor whose last dimension is contiguous; strides in elements, 0 allowed.
struct AttentionTensor {
  const void* data;
  int64_t batch, head, row;
  DType dtype;
};

// A packed tensor. Slice: one (batch, head).
struct AttentionPacked {
  void* row_major;      // A [slices, padded_rows, padded_columns], or null; rows that hold a NaN or infinity are zeros
  void* transposed;     // A [slices, tiles, columns, tile_width], or null; NaN and infinity as they are
  uint8_t* non_finite;  // [slices, padded_rows]: the row holds a NaN or an infinity
  int32_t* exponents;   // stored value = value * 2^-exponent; [slices, padded_rows], or [slices] if not per_row
  void* largest;        // A [slices]: largest finite magnitude as stored; only if not per_row
  int64_t heads, rows, columns, padded_rows, padded_columns, tile_width;
  bool per_row;
};

struct AttentionPackArgs {
  AttentionTensor source;
  AttentionPacked packed;
  const void* beside;  // A [slices, rows] or null: values that share the row's exponent (the gradient of lse)
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

// Per row two numbers of A: the largest score / 4 (-inf: no key takes part), and 1 / sum of exp(score - largest).
constexpr int64_t kAttentionStats = 2;

struct AttentionForwardArgs {
  AttentionProblem problem;
  AttentionTensor value;  // as given, for its rows that are not finite
  void* output;           // [batch, heads, queries, value_depth], dtype
  void* lse;              // A [batch, heads, queries]
  void* stats;            // A [batch, heads, queries, 2]
  void* scratch;  // A [kAttentionRows * (kAttentionKeys + value.padded_columns) + 2 * kAttentionKeys + value columns]
  int64_t begin, end;  // tasks to do: (batch, head, tile of kAttentionRows)
};

struct AttentionRowsArgs {
  AttentionProblem problem;
  AttentionTensor key;   // as given, for its rows that are not finite
  const void* stats;     // A [batch, heads, queries, 2]
  const void* grad_lse;  // A [batch, heads, queries], or null
  void* delta;           // A [batch, heads, queries], written: sum of P dP minus grad_lse, in the row's units
  void* grad_query;      // [batch, heads, queries, depth], dtype, or null
  void* grad_mask;       // [mask_size...], mask_dtype, or null
  int64_t mask_size[4];  // of the mask: each 1 or the full size; with grad_mask only
  int64_t tile_rows;     // multiple of kAttentionRowAlign, at most kAttentionRows
  void* scratch;         // A [tile_rows * (3 * span + key.padded_columns) + 2 * kAttentionKeys + key columns]
  double* mask_scratch;  // [tile_rows * keys], with grad_mask only
  int64_t span;          // keys rounded up to whole tiles
  int64_t begin, end;    // tasks to do: (mask batch, mask head, tile) of `tasks`
  int64_t tasks[3];      // batch, head, tile: each the full number, or 1 where the mask's gradient is a sum over it
};

struct AttentionKeysArgs {
  AttentionProblem problem;
  AttentionTensor query, grad;  // as given, for their rows that are not finite
  const void* stats;
  const void* delta;  // from the rows pass
  void* grad_key;     // [batch, kv_heads, keys, depth], dtype, or null
  void* grad_value;   // [batch, kv_heads, keys, value_depth], dtype, or null
  void* scratch;      // A [3 * kAttentionRows * kAttentionKeys + 144 * (padded columns of key + value) + 512 + columns]
  int64_t begin, end;  // tasks to do: (batch, kv_head, tile of kAttentionKeys)
};

ALLFINITE_CPU_KERNEL(attention_pack, AttentionPackArgs)
ALLFINITE_CPU_KERNEL(attention_forward, AttentionForwardArgs)
ALLFINITE_CPU_KERNEL(attention_backward_rows, AttentionRowsArgs)
ALLFINITE_CPU_KERNEL(attention_backward_keys, AttentionKeysArgs)

}  // namespace allfinite::cpu
