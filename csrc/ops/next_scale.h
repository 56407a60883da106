// The arithmetic of a loss scale, once: what update_scale_ computes (include/allfinite/ops/gradients.h). Torch-free.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

namespace allfinite {

struct ScaleRule {
  double growth_factor, backoff_factor;
  int64_t growth_interval;
  double min_scale, max_scale;
};

// float32(double(scale) * factor) as torch. A bound stops the scale on its way, and never moves one that is already
// beyond it; growth that would overflow is left out. NaN stays NaN.
inline void next_scale(float& scale, int32_t& growth_tracker, bool found_inf, const ScaleRule& rule) {
  if (found_inf) {
    const auto floor = static_cast<float>(rule.min_scale);
    const auto smaller = static_cast<float>(static_cast<double>(scale) * rule.backoff_factor);
    if (!(scale <= floor)) {
      scale = smaller < floor ? floor : smaller;
    }
    growth_tracker = 0;
    return;
  }
  const int64_t good = static_cast<int64_t>(growth_tracker) + 1;
  if (good < rule.growth_interval) {  // an interval beyond int32 is never reached
    growth_tracker = static_cast<int32_t>(good > std::numeric_limits<int32_t>::max() ? good - 1 : good);
    return;
  }
  const auto cap = static_cast<float>(rule.max_scale);
  const auto larger = static_cast<float>(static_cast<double>(scale) * rule.growth_factor);
  if (std::isfinite(larger) && scale < cap) {
    scale = larger > cap ? cap : larger;
  }
  growth_tracker = 0;
}

}  // namespace allfinite
