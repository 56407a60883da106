// The scaler's three ops on any device: AllFinite's where its kernels are, the CPU, and torch's elsewhere. To torch's
// is added, without a host sync, what they lack: the floor and the cap, growth once the interval is reached, a check
// of the unscaled value, shared memory unscaled once, bfloat16, float64 beyond float32, complex numbers.
#pragma once
#include <ATen/ATen.h>

#include <set>
#include <tuple>
#include <vector>

#include "allfinite/amp/scale_policy.h"
#include "allfinite/ops/gradients.h"

namespace allfinite::amp {

// A complex tensor as pairs of real numbers.
inline at::Tensor components(const at::Tensor& values) {
  return values.is_complex() ? at::view_as_real(values.resolve_conj()) : values;
}

// `values` as tensors of real numbers, without the entries that repeat another one's memory, and without the
// dimensions along which one repeats its own.
inline std::vector<at::Tensor> distinct_memory(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> result;
  std::set<std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>>> seen;
  for (const auto& entry : values) {
    at::Tensor real = components(entry);
    for (int64_t d = 0; d < real.dim(); ++d) {
      if (real.stride(d) == 0 && real.size(d) > 1) {
        real = real.narrow(d, 0, 1);
      }
    }
    if (seen.emplace(real.const_data_ptr(), real.sizes().vec(), real.strides().vec()).second) {
      result.push_back(real);
    }
  }
  return result;
}

namespace fallback {

inline void check(const at::Tensor& values, const at::Tensor& found_inf) {
  found_inf.clamp_min_(at::isfinite(values).all().logical_not().to(at::kFloat));
}

inline void unscale_and_check_(const std::vector<at::Tensor>& grads, at::Tensor found_inf,
                               const at::Tensor& inv_scale) {
  std::vector<at::Tensor> half, single;
  for (const auto& values : distinct_memory(grads)) {
    if (values.scalar_type() == at::kHalf || values.scalar_type() == at::kFloat) {
      (values.scalar_type() == at::kHalf ? half : single).push_back(values);
      continue;
    }
    check(values, found_inf);
    values.mul_(inv_scale);
    check(values, found_inf);
  }
  for (const auto& same_dtype : {half, single}) {
    if (!same_dtype.empty()) {
      at::_amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, inv_scale);
      at::_amp_foreach_non_finite_check_and_unscale_(same_dtype, found_inf, at::ones_like(inv_scale));
    }
  }
}

inline at::Tensor norm(const std::vector<at::Tensor>& grads) {
  std::vector<at::Tensor> norms;
  for (const auto& values : grads) {
    norms.push_back(at::linalg_vector_norm(components(values), 2, std::nullopt, false, at::kDouble));
  }
  return at::linalg_vector_norm(at::stack(norms), 2);
}

inline void clip_grads_with_norm_(const std::vector<at::Tensor>& grads, double max_norm, const at::Tensor& total_norm) {
  at::Tensor factor = (max_norm / (total_norm + 1e-6)).clamp_max(1.0);
  factor = at::where(at::isfinite(total_norm), factor, at::ones_like(factor));
  for (const auto& values : distinct_memory(grads)) {
    values.mul_(factor);
  }
}

inline void update_scale_(at::Tensor scale, at::Tensor growth_tracker, const at::Tensor& found_inf,
                          const ScalePolicy& policy) {
  const at::Tensor floor = scale.clamp_max(policy.min_scale()), cap = scale.clamp_min(policy.max_scale());
  growth_tracker.clamp_max_(policy.growth_interval() - 1);
  at::_amp_update_scale_(scale, growth_tracker, found_inf, policy.growth_factor(), policy.backoff_factor(),
                         policy.growth_interval());
  scale.copy_(at::minimum(at::maximum(scale, floor), cap));
}

}  // namespace fallback

// In place: grads *= inv_scale, and found_inf = 1 where one is not finite before or after. All on one device.
inline void unscale_and_check_(const std::vector<at::Tensor>& grads, const at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  found_inf.is_cpu() ? allfinite::unscale_and_check_(grads, found_inf, inv_scale)
                     : fallback::unscale_and_check_(grads, found_inf, inv_scale);
}

// L2 norm of all together, float64. One or more tensors of one device.
inline at::Tensor norm_of(const std::vector<at::Tensor>& grads) {
  return grads.front().is_cpu() ? get_total_norm(grads) : fallback::norm(grads);
}

// In place: grads *= min(1, max_norm / (total_norm + 1e-6)); nothing where total_norm is not finite. All on one device.
inline void clip_grads_with_norm_(const std::vector<at::Tensor>& grads, double max_norm, const at::Tensor& total_norm) {
  total_norm.is_cpu() ? allfinite::clip_grads_with_norm_(grads, max_norm, total_norm)
                      : fallback::clip_grads_with_norm_(grads, max_norm, total_norm);
}

}  // namespace allfinite::amp
