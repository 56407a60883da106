// AutocastGuard: torch's thread-local autocast state, set and put back.
#include "allfinite/amp/autocast_guard.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace allfinite::amp {
namespace {

constexpr char kOp[] = "allfinite::AutocastGuard";

// Whether autocast can be on; says so where it cannot.
bool usable(c10::DeviceType device, c10::ScalarType dtype) {
  if (device == at::kCUDA && !at::hasCUDA()) {
    TORCH_WARN(kOp, ": expected a CUDA device, but CUDA is not available. Disabling autocast.");
    return false;
  }
  const bool full_precision_on_cuda = device == at::kCUDA && dtype == at::kFloat;
  if (dtype != at::kHalf && dtype != at::kBFloat16 && !full_precision_on_cuda) {
    TORCH_WARN(kOp, ": expected dtype float16 or bfloat16 for device ", device, ", but got ", dtype,
               ". Disabling autocast.");
    return false;
  }
  return true;
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled,
                             std::optional<bool> cache_enabled)
    : device_(device) {
  TORCH_CHECK(at::autocast::is_autocast_available(device), kOp, ": expected a device with autocast, but got ", device);
  previous_dtype_ = at::autocast::get_autocast_dtype(device);
  previous_enabled_ = at::autocast::is_autocast_enabled(device);
  previous_cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  const auto target = dtype.value_or(previous_dtype_);
  TORCH_CHECK_TYPE(at::isFloatingType(target), kOp, ": expected a floating point dtype, but got ", target);
  const bool on = enabled && usable(device, target);

  at::autocast::set_autocast_enabled(device, on);
  at::autocast::set_autocast_dtype(device, target);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(
      cache_enabled.value_or(previous_cache_enabled_ && c10::GradMode::is_enabled()));
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_enabled_);
}

}  // namespace allfinite::amp
