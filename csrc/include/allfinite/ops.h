// AllFinite's ops for C++. Each is a torch op as well (torch.ops.allfinite.<name>) with autograd, autocast
// and meta kernels, on CPU and CUDA. The numeric contract (F1 to F7) is in docs/numerics.md.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "allfinite/export.h"

namespace allfinite {

// (input - mean) / sqrt(var + eps) * weight + bias over the last dimensions, as torch::layer_norm.
//
// input: [..., *normalized_shape], fp16, bf16, fp32 or fp64. weight, bias: normalized_shape, each absent, of
// input's dtype, or fp32 beside a 16-bit input. Result: shape and dtype of input, rounded once from fp32
// (fp64) arithmetic; contiguous. Statistics are fp32 (fp64 for fp64), with the mean as a pair of numbers: no
// loss where mean >> std, and rows of any magnitude are right (a row whose squares leave fp32's range is
// rescaled by a power of two). A NaN or infinity makes its own row NaN. Zero variance with eps 0 gives bias,
// and gradient 0. Errors: c10::TypeError (dtype), c10::ValueError (shape, eps < 0 or not finite), c10::Error
// (device). Double backward works; forward-mode differentiation raises NotImplementedError.
ALLFINITE_API at::Tensor layer_norm(const at::Tensor& input, at::IntArrayRef normalized_shape,
                                    const std::optional<at::Tensor>& weight = {},
                                    const std::optional<at::Tensor>& bias = {}, double eps = 1e-5);

// Divides gradients by the loss scale, in place, and reports overflow: grads *= inv_scale.
//
// grads: any number of dense tensors of any strides, fp16, bf16, fp32, fp64 and complex mixed. found_inf, inv_scale:
// fp32, one element; all on one device. Products are taken in fp32 (fp64 for fp64) and rounded once. Complex tensors
// are pairs of real numbers. Memory that several elements or several entries share is scaled once; entries that
// overlap with different dtypes are an error.
//
// found_inf becomes 1 where any incoming or any unscaled value is infinite or NaN (60000 * 2 in fp16 is); it is never
// cleared, so one flag serves several calls. All gradients are unscaled all the same. With inv_scale == 1 they are
// only checked. Same bits with any number of threads. Nothing is written when an argument is refused:
// c10::TypeError (dtype), c10::ValueError (shape, overlap), c10::NotImplementedError (sparse: pass the values of the
// coalesced tensor), c10::Error (device).
ALLFINITE_API void unscale_and_check_(at::TensorList grads, const at::Tensor& found_inf, const at::Tensor& inv_scale);

// What one read of some gradients tells; tensors of no dimension, on their device.
struct GradStats {
  at::Tensor found_inf;   // fp32: 1 if any value is infinite or NaN, else 0
  at::Tensor norm;        // fp64: sqrt of the sum of squares
  at::Tensor amax;        // fp64: the largest magnitude
  at::Tensor zeros;       // int64: values that are 0
  at::Tensor subnormals;  // int64: values other than 0 below the smallest normal number of their own dtype
};

// Statistics over all values of grads together; dtypes and strides as in unscale_and_check_, complex values count as
// two numbers, and memory that entries share counts each time.
//
// The norm is computed in double, and right for every finite input: squares that leave double's range (fp64) are done
// again with a power of two; beyond double it is infinity with found_inf 0. It is the same with any number of threads.
// A NaN makes norm and amax NaN, infinity without NaN makes both infinite. No tensor: all 0, on the CPU.
// Errors: as unscale_and_check_. Not differentiable: a backward through norm or amax raises.
ALLFINITE_API GradStats grad_stats(at::TensorList grads);

// Moves a loss scale after an iteration, in place and without a host sync.
//
// scale: fp32, growth_tracker: int32, found_inf: fp32, one element each, on one device.
//   found_inf != 0 (NaN as well): scale *= backoff_factor, but not below min_scale; growth_tracker = 0.
//   otherwise, when growth_tracker + 1 >= growth_interval: scale *= growth_factor, but not above max_scale and only if
//   that is finite; growth_tracker = 0. Else growth_tracker += 1.
// A scale that already lies at or beyond a bound is left where it is: min_scale limits back-off only, max_scale growth
// only. Products are float32(double(scale) * factor), torch's bits.
// Errors, before anything is written: c10::TypeError (dtype), c10::Error (device), c10::ValueError (shape;
// growth_factor < 1, backoff_factor outside (0, 1], growth_interval < 1, min_scale > max_scale, a bound outside
// [2^-126, 2^126]; NaN).
ALLFINITE_API void update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                                 double growth_factor, double backoff_factor, int64_t growth_interval, double min_scale,
                                 double max_scale);

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
