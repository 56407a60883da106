// torch.autocast for C++: a scope in which torch's ops choose their own dtype.
#pragma once
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <optional>

#include "allfinite/export.h"

namespace allfinite::amp {

// While it lives, ops on `device` in this thread run in `dtype` where that is safe, as under torch.autocast.
// When it goes, by any way out of the scope, dtype, enabled flag and cache flag are what they were before. Guards
// nest, also within torch.autocast, and in the order in which they were made; the cast weights that
// torch keeps are dropped at the outermost exit, so that they neither pile up nor go stale.
//
//   {
//     allfinite::amp::AutocastGuard guard(torch::kCUDA, torch::kHalf);
//     loss = criterion(model->forward(x), y);
//   }
//   scaler.scale(loss).backward();  // outside of the scope
//
// dtype: absent, that of the device (float16 for CUDA, bfloat16 for CPU). Checked as torch.autocast does: a CPU
// guard of another dtype than float16 and bfloat16, and a CUDA guard on a machine without CUDA, warn and are
// disabled. Errors, before anything is changed: c10::Error for a device without autocast, c10::TypeError for a
// dtype that is not floating point.
//
// enabled = false makes a region that runs in the inputs' dtype inside one that autocasts.
//
// cache_enabled: absent, the current setting, but off where gradients are off: in older torch versions a weight that
// was cast there has no gradient, and a later forward that needs one would get that copy.
class ALLFINITE_API AutocastGuard {
 public:
  explicit AutocastGuard(c10::DeviceType device, std::optional<c10::ScalarType> dtype = {}, bool enabled = true,
                         std::optional<bool> cache_enabled = {});
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard(AutocastGuard&&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;
  AutocastGuard& operator=(AutocastGuard&&) = delete;

 private:
  c10::DeviceType device_;
  c10::ScalarType previous_dtype_;
  bool previous_enabled_;
  bool previous_cache_enabled_;
};

}  // namespace allfinite::amp
