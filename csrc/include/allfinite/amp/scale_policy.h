// How a loss scale moves: its hyper-parameters, validated, and the step from one scale to the next. Knows no
// optimizer.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "allfinite/export.h"

namespace allfinite::amp {

// A loss scale and the number of good iterations since it last moved.
struct ScaleState {
  double scale;  // a float32 value
  int64_t growth_tracker;
};

// After an iteration with a non-finite gradient: scale * backoff_factor, but not below min_scale; the tracker
// starts again at 0. After a good one the tracker goes up by one; when it reaches growth_interval: scale *
// growth_factor, but not above max_scale, and the tracker starts again. A scale that already lies beyond a
// bound (because a user gave it) is never moved across that bound by the bound itself: min_scale limits
// back-off only, max_scale growth only.
//
// Every value is checked where it enters, here and in the setters. c10::ValueError, and nothing is changed:
//   growth_factor    finite and > 1                          backoff_factor   > 0 and < 1
//   growth_interval  >= 1                                    min_scale <= max_scale, both in [2^-126, 2^126]
class ALLFINITE_API ScalePolicy {
 public:
  // torch's defaults, with a floor of 1 and a cap of 2^24.
  ScalePolicy() = default;
  ScalePolicy(double growth_factor, double backoff_factor, int64_t growth_interval, double min_scale = 1.0,
              double max_scale = 16777216.0);

  double growth_factor() const { return growth_factor_; }
  double backoff_factor() const { return backoff_factor_; }
  int64_t growth_interval() const { return growth_interval_; }
  double min_scale() const { return min_scale_; }
  double max_scale() const { return max_scale_; }

  void set_growth_factor(double value);
  void set_backoff_factor(double value);
  void set_growth_interval(int64_t value);
  void set_min_scale(double value);
  void set_max_scale(double value);

  // The state after an iteration, on the host. The arithmetic is that of the op allfinite::update_scale_, bit
  // for bit. Errors: c10::ValueError for a state that no scaler can be in (see check_scale, check_tracker).
  ScaleState next(const ScaleState& state, bool found_inf) const;

  // The same in place on tensors of one element (float32 scale, int32 growth_tracker, float32 found_inf: any
  // value but 0, also NaN, means found) on one device, without a host sync.
  void update_(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf) const;

  // Returns `value` rounded to float32. c10::ValueError naming `name` unless it is finite and > 0 then.
  static double check_scale(const char* name, double value);
  // Returns `value`. c10::ValueError unless it lies in [0, 2^31 - 1).
  static int64_t check_tracker(int64_t value);

  bool operator==(const ScalePolicy& other) const = default;

 private:
  double growth_factor_ = 2.0;
  double backoff_factor_ = 0.5;
  int64_t growth_interval_ = 2000;
  double min_scale_ = 1.0;
  double max_scale_ = 16777216.0;
};

}  // namespace allfinite::amp
