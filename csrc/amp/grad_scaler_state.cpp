// Saving and loading a GradScaler: plain numbers in a torch archive, all checked before one is taken.
#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include "allfinite/amp/grad_scaler.h"

namespace allfinite::amp {
namespace {

constexpr char kLoad[] = "allfinite::GradScaler::load";

c10::IValue read(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value), kLoad, ": expected the archive of a GradScaler, but got one without \"",
              key, "\"");
  return value;
}

double read_double(torch::serialize::InputArchive& archive, const char* key) {
  const auto value = read(archive, key);
  TORCH_CHECK(value.isDouble(), kLoad, ": expected \"", key, "\" to be a floating point number, but got ",
              value.tagKind());
  return value.toDouble();
}

int64_t read_int(torch::serialize::InputArchive& archive, const char* key) {
  const auto value = read(archive, key);
  TORCH_CHECK(value.isInt(), kLoad, ": expected \"", key, "\" to be an integer, but got ", value.tagKind());
  return value.toInt();
}

}  // namespace

GradScalerState GradScaler::state() const {
  return {get_scale(), get_growth_tracker(), policy_};
}

void GradScaler::load_state(const GradScalerState& state) {
  if (!enabled_) {
    return;
  }
  const double scale = ScalePolicy::check_scale("scale", state.scale);
  const int64_t tracker = ScalePolicy::check_tracker(state.growth_tracker);
  if (scale_.defined()) {
    scale_.fill_(scale);
    growth_tracker_.fill_(tracker);
  }
  init_scale_ = scale;
  init_growth_tracker_ = tracker;
  policy_ = state.policy;
  given_below_one_ = scale < 1;
  loaded_ = true;
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("enabled", c10::IValue(enabled_));
  archive.write("scale", c10::IValue(get_scale()));
  archive.write("growth_tracker", c10::IValue(get_growth_tracker()));
  archive.write("growth_factor", c10::IValue(policy_.growth_factor()));
  archive.write("backoff_factor", c10::IValue(policy_.backoff_factor()));
  archive.write("growth_interval", c10::IValue(policy_.growth_interval()));
  archive.write("min_scale", c10::IValue(policy_.min_scale()));
  archive.write("max_scale", c10::IValue(policy_.max_scale()));
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!enabled_) {
    return;
  }
  const auto enabled = read(archive, "enabled");
  TORCH_CHECK(enabled.isBool(), kLoad, ": expected \"enabled\" to be a bool, but got ", enabled.tagKind());
  TORCH_CHECK(enabled.toBool(), kLoad,
              ": expected the state of an enabled GradScaler, but got one that was saved from a disabled instance of "
              "GradScaler.");
  const double scale = read_double(archive, "scale");
  const int64_t tracker = read_int(archive, "growth_tracker");
  const ScalePolicy policy(read_double(archive, "growth_factor"), read_double(archive, "backoff_factor"),
                           read_int(archive, "growth_interval"), read_double(archive, "min_scale"),
                           read_double(archive, "max_scale"));
  load_state({scale, tracker, policy});
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace allfinite::amp
