// What GradScaler::step tells about a step.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <string>

#include "allfinite/export.h"

namespace allfinite::amp {

enum class StepStatus {
  Stepped,      // the optimizer stepped
  Skipped,      // a gradient was not finite: parameters and optimizer are as they were
  NoGradients,  // no parameter had a gradient: nothing was done
};

// Why a step was skipped.
enum class SkipReason {
  None,          // not skipped; or the gradients have been changed since unscale_ and are finite now
  Inf,           // the parameter's gradient holds an infinity
  NaN,           // it holds a NaN
  AfterUnscale,  // all scaled gradients were finite: dividing by a scale below 1 took one beyond its dtype
};

struct StepResult {
  StepStatus status = StepStatus::NoGradients;

  // Of a skipped step: why, and the first parameter, in the order of the groups, with a non-finite gradient.
  // The gradients are looked at as step finds them.
  SkipReason reason = SkipReason::None;
  int64_t param_group = -1;  // -1: none
  int64_t param_index = -1;  // within its group
  std::string param_name;    // empty: none was given, see GradScaler::name_parameters
  double amax = 0;           // largest finite magnitude in its unscaled gradient; 0 where there is none

  // The scale that the gradients were divided by, 1 for a disabled scaler; 0 without gradients.
  double scale = 0;
  // Of a skipped step: the scale is at min_scale or below it, so that update() will not back off.
  bool at_floor = false;

  // What optimizer.step returned; undefined where it was not called.
  at::Tensor loss;
};

ALLFINITE_API const char* to_string(StepStatus status);
ALLFINITE_API const char* to_string(SkipReason reason);

// One line, such as "skipped: inf in the gradient of parameter group 0, index 3 (encoder.weight), at scale 65536".
ALLFINITE_API std::ostream& operator<<(std::ostream& out, const StepResult& result);

}  // namespace allfinite::amp
