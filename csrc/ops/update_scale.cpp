// update_scale_: check, autograd, meta, CPU, C++ function. The arithmetic: next_scale.h.
// Autocast: none is registered, the dtypes are fixed.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "allfinite/ops/gradients.h"
#include "ops/gradient_checks.h"
#include "ops/in_place.h"
#include "ops/next_scale.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::update_scale_";

using UpdateScale = void(Tensor&, Tensor&, const Tensor&, double, double, int64_t, double, double);

// --- check -----------------------------------------------------------------------------------------------------------

void check_bound(const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0x1p-126 && value <= 0x1p126, kOp, ": expected ", name,
                    " between 2^-126 and 2^126, but got ", value);
}

void check_arguments(const Tensor& scale, const Tensor& growth_tracker, const Tensor& found_inf,
                     const ScaleRule& rule) {
  check::one_number(kOp, "scale", scale, at::kFloat);
  check::one_number(kOp, "growth_tracker", growth_tracker, at::kInt);
  check::one_number(kOp, "found_inf", found_inf, at::kFloat);
  check::same_device(kOp, "growth_tracker", growth_tracker, "scale", scale);
  check::same_device(kOp, "found_inf", found_inf, "scale", scale);
  TORCH_CHECK_VALUE(rule.growth_factor >= 1 && std::isfinite(rule.growth_factor), kOp,
                    ": expected growth_factor >= 1 and finite, but got ", rule.growth_factor);
  TORCH_CHECK_VALUE(rule.backoff_factor > 0 && rule.backoff_factor <= 1, kOp,
                    ": expected 0 < backoff_factor <= 1, but got ", rule.backoff_factor);
  TORCH_CHECK_VALUE(rule.growth_interval >= 1, kOp, ": expected growth_interval >= 1, but got ", rule.growth_interval);
  check_bound("min_scale", rule.min_scale);
  check_bound("max_scale", rule.max_scale);
  TORCH_CHECK_VALUE(rule.min_scale <= rule.max_scale, kOp, ": expected min_scale <= max_scale, but got ",
                    rule.min_scale, " and ", rule.max_scale);
}

// --- autograd: not differentiable; writes are counted ----------------------------------------------------------------

void update_scale_autograd(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                           double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  outside_graphs(kOp, {scale, growth_tracker}, [&] {
    update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale,
                  max_scale);
  });
}

void update_scale_counted(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                          double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  counting_writes({scale, growth_tracker}, [&] {
    update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale,
                  max_scale);
  });
}

// --- meta ------------------------------------------------------------------------------------------------------------

void update_scale_meta(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                       double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  check_arguments(scale, growth_tracker, found_inf,
                  {growth_factor, backoff_factor, growth_interval, min_scale, max_scale});
}

// --- CPU -------------------------------------------------------------------------------------------------------------

void update_scale_cpu(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                      double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  const ScaleRule rule{growth_factor, backoff_factor, growth_interval, min_scale, max_scale};
  check_arguments(scale, growth_tracker, found_inf, rule);
  next_scale(*scale.mutable_data_ptr<float>(), *growth_tracker.mutable_data_ptr<int32_t>(),
             *found_inf.const_data_ptr<float>() != 0, rule);
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("update_scale_", update_scale_autograd);
}
TORCH_LIBRARY_IMPL(allfinite, ADInplaceOrView, m) {
  m.impl("update_scale_", update_scale_counted);
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("update_scale_", update_scale_meta);
}
// For the message.
TORCH_LIBRARY_IMPL(allfinite, SparseCPU, m) {
  m.impl("update_scale_", update_scale_meta);
}
TORCH_LIBRARY_IMPL(allfinite, SparseCsrCPU, m) {
  m.impl("update_scale_", update_scale_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("update_scale_", update_scale_cpu);
}

void update_scale_(const Tensor& scale, const Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                   double backoff_factor, int64_t growth_interval, double min_scale, double max_scale) {
  static const auto op = find_op<UpdateScale>(kOp);
  Tensor s = scale, tracker = growth_tracker;
  op.call(s, tracker, found_inf, growth_factor, backoff_factor, growth_interval, min_scale, max_scale);
}

}  // namespace allfinite
