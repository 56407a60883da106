// Attention. Part of allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "allfinite/export.h"

namespace allfinite {

// softmax(query key^T * scale) value, as torch::scaled_dot_product_attention, with more masks and a contract.
//
// query: [..., heads, Sq, D]; key: [..., kv_heads, Sk, D]; value: [..., kv_heads, Sk, Dv]; two dimensions or more, one
// dtype: fp16, bf16, fp32 or fp64. Leading dimensions broadcast; with enable_gqa heads is a multiple of kv_heads
// instead. Result: [..., heads, Sq, Dv] in query's dtype, contiguous, rounded once from fp32 (fp64) arithmetic.
// Scores are made in this order: scale (default 1 / sqrt(D); any sign, 0), softcap (softcap * tanh(score / softcap); 0:
// none), attn_mask, is_causal and window.
//   attn_mask  broadcasts to [..., heads, Sq, Sk]. bool: true takes part; fp16, bf16, fp32 or fp64 (whatever query's
//              dtype is): added in fp32 (fp64); -inf masks, and a finite value never does. Differentiable.
//   is_causal  key j takes part in row i where j <= i (top left); not together with attn_mask.
//   window     {left, right}: -left <= j - i <= right; -1 is unbounded.
//   dropout_p  in [0, 1], exact to 2^-32; drawn from torch's default generator. 1 gives zeros.
// NaN and infinity: one that takes part shows in the rows it takes part in, and in no other; one in a masked key or
// value never shows, forward or backward. Finite tensors give finite results wherever the exact result is in range of
// the dtype and the sum of |scale q k| is below 2^127. A row that no key takes part in: 0, lse -inf, gradients 0.
// Backward is linear in the gradient bit for bit under powers of two; the same bits with any number of threads.
// Errors: c10::TypeError (dtypes), c10::ValueError (shapes, probabilities, window), c10::NotImplementedError (layout,
// forward-mode and double differentiation), c10::Error (device, attn_mask together with is_causal).
ALLFINITE_API at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value,
                                                      const std::optional<at::Tensor>& attn_mask = {},
                                                      double dropout_p = 0.0, bool is_causal = false,
                                                      std::optional<double> scale = {}, bool enable_gqa = false,
                                                      double softcap = 0.0, at::OptionalIntArrayRef window = {});

// The same, and lse: the natural logarithm of the sum of exp(score) over the keys that take part, before dropout;
// [..., heads, Sq], fp32 (fp64 for fp64), differentiable.
ALLFINITE_API std::tuple<at::Tensor, at::Tensor> scaled_dot_product_attention_lse(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask = {}, double dropout_p = 0.0, bool is_causal = false,
    std::optional<double> scale = {}, bool enable_gqa = false, double softcap = 0.0,
    at::OptionalIntArrayRef window = {});

}  // namespace allfinite
