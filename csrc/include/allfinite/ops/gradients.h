// Ops on gradients and on the loss scale: what a GradScaler is made of. None waits for a device. Part of
// allfinite/ops.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "allfinite/export.h"

namespace allfinite {

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

// The p-norm of all values of tensors together, as if they were one vector: fp64, no dimension, on their device.
//
// tensors: as grads of grad_stats. norm_type: > 0; infinity is the largest magnitude. Powers are added in double, and
// those that leave its range are done again with a power of two, so that the norm is right for every finite input; it
// is the same with any number of threads. A NaN gives NaN, infinity without NaN infinity; no tensor gives 0, on the
// CPU. Errors: as grad_stats; c10::ValueError (norm_type). Not differentiable.
ALLFINITE_API at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0);

// Scales gradients in place so that their norm, total_norm, becomes max_norm at most:
// grads *= min(1, max_norm / (total_norm + 1e-6)).
//
// grads: as in unscale_and_check_; shared memory is scaled once. max_norm: >= 0. total_norm: floating, one element. The
// factor is formed in double, products are taken in fp32 (fp64 for fp64) and rounded once; factors below 2^-126 do not
// vanish. A factor of 1, and a total_norm that is not finite, change nothing, not a bit. Errors, before anything is
// written: as unscale_and_check_; c10::ValueError (max_norm).
ALLFINITE_API void clip_grads_with_norm_(at::TensorList grads, double max_norm, const at::Tensor& total_norm);

// Both on the gradients of parameters, as torch::nn::utils::clip_grad_norm_; parameters without a gradient are passed
// over. Returns the norm before clipping, fp64; it waits for the device only with error_if_nonfinite, which raises
// c10::Error at a norm that is not finite, before anything is written.
ALLFINITE_API at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type = 2.0,
                                         bool error_if_nonfinite = false);

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

}  // namespace allfinite
