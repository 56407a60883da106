// ScalePolicy: the checks of its values, and the way to the op that holds the arithmetic.
#include "allfinite/amp/scale_policy.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "amp/device_ops.h"

namespace allfinite::amp {

using at::Tensor;

namespace {

constexpr char kOp[] = "allfinite::ScalePolicy";

double check_growth_factor(double value) {
  TORCH_CHECK_VALUE(value > 1 && std::isfinite(value), kOp, ": expected growth_factor to be finite and > 1, but got ",
                    value);
  return value;
}

double check_backoff_factor(double value) {
  TORCH_CHECK_VALUE(value > 0 && value < 1, kOp, ": expected backoff_factor in (0, 1), but got ", value);
  return value;
}

int64_t check_growth_interval(int64_t value) {
  TORCH_CHECK_VALUE(value >= 1, kOp, ": expected growth_interval >= 1, but got ", value);
  return value;
}

// Within these a scale and its inverse are normal float32 numbers.
double check_bound(const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0x1p-126 && value <= 0x1p126, kOp, ": expected ", name, " in [2^-126, 2^126], but got ",
                    value);
  return value;
}

void check_order(double min_scale, double max_scale) {
  TORCH_CHECK_VALUE(min_scale <= max_scale, kOp, ": expected min_scale <= max_scale, but got min_scale ", min_scale,
                    " and max_scale ", max_scale);
}

}  // namespace

ScalePolicy::ScalePolicy(double growth_factor, double backoff_factor, int64_t growth_interval, double min_scale,
                         double max_scale)
    : growth_factor_(check_growth_factor(growth_factor)),
      backoff_factor_(check_backoff_factor(backoff_factor)),
      growth_interval_(check_growth_interval(growth_interval)),
      min_scale_(check_bound("min_scale", min_scale)),
      max_scale_(check_bound("max_scale", max_scale)) {
  check_order(min_scale, max_scale);
}

void ScalePolicy::set_growth_factor(double value) {
  growth_factor_ = check_growth_factor(value);
}

void ScalePolicy::set_backoff_factor(double value) {
  backoff_factor_ = check_backoff_factor(value);
}

void ScalePolicy::set_growth_interval(int64_t value) {
  growth_interval_ = check_growth_interval(value);
}

void ScalePolicy::set_min_scale(double value) {
  check_order(check_bound("min_scale", value), max_scale_);
  min_scale_ = value;
}

void ScalePolicy::set_max_scale(double value) {
  check_order(min_scale_, check_bound("max_scale", value));
  max_scale_ = value;
}

ScaleState ScalePolicy::next(const ScaleState& state, bool found_inf) const {
  const Tensor scale = at::scalar_tensor(check_scale("scale", state.scale), at::kFloat);
  const Tensor tracker = at::scalar_tensor(check_tracker(state.growth_tracker), at::kInt);
  update_(scale, tracker, at::scalar_tensor(found_inf ? 1.0 : 0.0, at::kFloat));
  return {*scale.const_data_ptr<float>(), *tracker.const_data_ptr<int32_t>()};
}

void ScalePolicy::update_(const Tensor& scale, const Tensor& growth_tracker, const Tensor& found_inf) const {
  if (!scale.is_cpu()) {
    fallback::update_scale_(scale, growth_tracker, found_inf, *this);
    return;
  }
  update_scale_(scale, growth_tracker, found_inf, growth_factor_, backoff_factor_, growth_interval_, min_scale_,
                max_scale_);
}

double ScalePolicy::check_scale(const char* name, double value) {
  const auto rounded = static_cast<float>(value);
  TORCH_CHECK_VALUE(rounded > 0 && std::isfinite(rounded), kOp, ": expected ", name,
                    " to be finite and > 0 as float32, but got ", value);
  return rounded;
}

int64_t ScalePolicy::check_tracker(int64_t value) {
  TORCH_CHECK_VALUE(value >= 0 && value < std::numeric_limits<int32_t>::max(), kOp,
                    ": expected growth_tracker in [0, 2^31 - 1), but got ", value);
  return value;
}

}  // namespace allfinite::amp
