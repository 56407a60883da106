// The words of a StepResult.
#include "allfinite/amp/step_result.h"

#include <ostream>
#include <string>

#include "amp/gradients.h"

namespace allfinite::amp {

std::string place_of(int64_t group, int64_t index, const std::string& name) {
  const auto place = "parameter group " + std::to_string(group) + ", index " + std::to_string(index);
  return name.empty() ? place : place + " (" + name + ")";
}

const char* to_string(StepStatus status) {
  switch (status) {
    case StepStatus::Stepped:
      return "stepped";
    case StepStatus::Skipped:
      return "skipped";
    default:
      return "no_gradients";
  }
}

const char* to_string(SkipReason reason) {
  switch (reason) {
    case SkipReason::Inf:
      return "inf";
    case SkipReason::NaN:
      return "nan";
    case SkipReason::AfterUnscale:
      return "after_unscale";
    default:
      return "none";
  }
}

std::ostream& operator<<(std::ostream& out, const StepResult& result) {
  out << to_string(result.status);
  if (result.status == StepStatus::Skipped) {
    out << ": " << to_string(result.reason);
    if (result.param_group >= 0) {
      out << " in the gradient of " << place_of(result.param_group, result.param_index, result.param_name);
    }
    out << ", at scale " << result.scale;
  }
  return out;
}

}  // namespace allfinite::amp
