// GradScaler: scale, unscale_, clip_grad_norm_, step, update. Their order is kept in iteration.h, the gradients
// are handled in gradients.cpp, the scale moves in ScalePolicy; saving and loading: grad_scaler_state.cpp.
#include "allfinite/amp/grad_scaler.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string>
#include <utility>

#include "amp/device_ops.h"
#include "amp/gradients.h"
#include "amp/iteration.h"

namespace allfinite::amp {
namespace {

using at::Tensor;
using torch::optim::Optimizer;

constexpr char kScale[] = "allfinite::GradScaler::scale";
constexpr char kUnscale[] = "allfinite::GradScaler::unscale_";
constexpr char kClip[] = "allfinite::GradScaler::clip_grad_norm_";
constexpr char kStep[] = "allfinite::GradScaler::step";
constexpr char kUpdate[] = "allfinite::GradScaler::update";

bool usable(const GradScalerOptions& options) {
  if (options.enabled() && options.device() == at::kCUDA && !at::hasCUDA()) {
    TORCH_WARN("allfinite::GradScaler: expected a CUDA device, but CUDA is not available. Disabling.");
    return false;
  }
  return options.enabled();
}

// float32(1 / double(scale)), on the device of `scale`.
Tensor inverse_of(const Tensor& scale) {
  return scale.to(at::kDouble).reciprocal().to(at::kFloat);
}

Tensor times_scale(const Tensor& outputs, const Tensor& scale) {
  const auto dtype = outputs.scalar_type();
  const bool reduced = dtype == at::kHalf || dtype == at::kBFloat16;
  return (reduced ? outputs.to(at::kFloat) : outputs) * scale.to(outputs.device());
}

// Not to the CPU without waiting: the host would read before the copy has arrived.
Tensor moved(const Tensor& t, const at::Device& device) {
  return t.to(device, /*non_blocking=*/!device.is_cpu());
}

// {whether one of `found_inf` is set, scale}, with one wait for the device.
std::pair<bool, double> read(const std::vector<Tensor>& found_inf, const Tensor& scale) {
  std::vector<Tensor> values{scale};
  for (const auto& found : found_inf) {
    values.push_back(moved(found, scale.device()));
  }
  const Tensor host = at::stack(values).cpu();
  const float* data = host.const_data_ptr<float>();
  return {std::any_of(data + 1, data + host.numel(), [](float f) { return f != 0; }), data[0]};
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : device_(options.device()),
      enabled_(false),
      policy_(options.growth_factor(), options.backoff_factor(), options.growth_interval(), options.min_scale(),
              options.max_scale()),
      init_scale_(ScalePolicy::check_scale("init_scale", options.init_scale())),
      given_below_one_(init_scale_ < 1),
      iteration_(std::make_unique<Iteration>()) {
  enabled_ = usable(options);
}

GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

// --- scale

void GradScaler::place_scale(const at::Device& device) {
  if (!scale_.defined()) {
    scale_ = at::full({}, init_scale_, at::TensorOptions().dtype(at::kFloat).device(device));
    growth_tracker_ = at::full({}, init_growth_tracker_, at::TensorOptions().dtype(at::kInt).device(device));
  }
}

Tensor GradScaler::scale(const Tensor& outputs) {
  TORCH_CHECK_VALUE(outputs.defined(), kScale, ": expected a tensor, but got an undefined one");
  if (!enabled_) {
    return outputs;
  }
  place_scale(outputs.device());
  return times_scale(outputs, scale_);
}

std::vector<Tensor> GradScaler::scale(const std::vector<Tensor>& outputs) {
  std::vector<Tensor> result;
  result.reserve(outputs.size());
  for (const auto& output : outputs) {
    result.push_back(scale(output));
  }
  return result;
}

// --- unscale_

void GradScaler::require_scale(const char* method) const {
  TORCH_CHECK(scale_.defined() || loaded_, method,
              ": expected scale() to be called first, but got no scale yet. This may indicate your script did not use "
              "scaler.scale(loss or outputs) earlier in the iteration.");
}

// Where no gradient can become infinite by being divided, the extra pass that tells why is not needed. On a CPU
// the scale can be read; elsewhere that would be a wait.
bool GradScaler::scale_may_be_below_one() const {
  return scale_.is_cpu() ? *scale_.const_data_ptr<float>() < 1 : given_below_one_ || policy_.min_scale() < 1;
}

void GradScaler::unscale_gradients(Optimizer& optimizer, OptimizerRecord& record) {
  const c10::NoGradGuard no_grad;
  const auto gradients = gradients_of(kUnscale, optimizer);
  for (const auto& g : gradients) {
    TORCH_CHECK(!iteration_->contains(g.parameter) && !iteration_->contains(g.parameter.grad()), kUnscale,
                ": expected each parameter in one optimizer, but got ",
                place_of(g.group, g.index, name_of(g.parameter)),
                ", whose gradient has already been unscaled for another optimizer since the last update()");
  }
  if (!gradients.empty()) {
    place_scale(gradients.front().values.device());
    const Tensor inv_scale = inverse_of(scale_);
    const bool look_first = scale_may_be_below_one();
    const auto flag = at::TensorOptions().dtype(at::kFloat);
    std::vector<Tensor> found_inf, found_inf_scaled;
    for (const auto& [device, values] : by_device(gradients)) {
      if (look_first) {
        found_inf_scaled.push_back(at::zeros({}, flag.device(device)));
        unscale_and_check_(values, found_inf_scaled.back(), at::ones({}, flag.device(device)));
      }
      found_inf.push_back(at::zeros({}, flag.device(device)));
      unscale_and_check_(values, found_inf.back(), inv_scale.to(device));
    }
    store_coalesced(gradients);
    record.found_inf = std::move(found_inf);
    record.found_inf_scaled = std::move(found_inf_scaled);
  }
  for (const auto& g : gradients) {
    iteration_->add(g.parameter);
    iteration_->add(g.parameter.grad());
  }
  record.stage = Stage::Unscaled;
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) {
    return;
  }
  require_scale(kUnscale);
  auto& record = iteration_->record_of(optimizer);
  TORCH_CHECK(record.stage != Stage::Unscaled, kUnscale,
              ": expected one call in an iteration, but got a second: unscale_() has already been called on this "
              "optimizer since the last update().");
  TORCH_CHECK(record.stage != Stage::Stepped, kUnscale,
              ": expected a call before step(), but got one after it: unscale_() is being called after step().");
  unscale_gradients(optimizer, record);
}

Tensor GradScaler::clip_grad_norm_(Optimizer& optimizer, double max_norm) {
  TORCH_CHECK_VALUE(max_norm >= 0, kClip, ": expected max_norm >= 0, but got ", max_norm);
  if (enabled_) {
    require_scale(kClip);
    auto& record = iteration_->record_of(optimizer);
    TORCH_CHECK(record.stage != Stage::Stepped, kClip,
                ": expected a call before step(), but got one after it: clip_grad_norm_() is being called after "
                "step().");
    if (record.stage == Stage::Ready) {
      unscale_gradients(optimizer, record);
    }
  }
  const c10::NoGradGuard no_grad;
  const auto gradients = gradients_of(kClip, optimizer);
  const auto devices = by_device(gradients);
  if (devices.empty()) {
    return at::zeros({}, at::kDouble);
  }
  Tensor norm;
  for (const auto& entry : devices) {
    const Tensor part = norm_of(entry.values);
    norm = norm.defined() ? at::hypot(norm, part.to(norm.device())) : part;
  }
  for (const auto& entry : devices) {
    clip_grads_with_norm_(entry.values, max_norm, norm.to(entry.device));
  }
  store_coalesced(gradients);
  return norm;
}

// --- step

StepResult GradScaler::step(Optimizer& optimizer) {
  return step(optimizer, nullptr);
}

StepResult GradScaler::step(Optimizer& optimizer, const Optimizer::LossClosure& closure) {
  StepResult result;
  if (!enabled_) {
    result.status = StepStatus::Stepped;
    result.scale = 1;
    result.loss = optimizer.step(closure);
    return result;
  }
  TORCH_CHECK(!closure, kStep,
              ": expected no closure, but got one: Closure use is not currently supported if GradScaler is enabled.");
  require_scale(kStep);
  auto& record = iteration_->record_of(optimizer);
  TORCH_CHECK(record.stage != Stage::Stepped, kStep,
              ": expected one call in an iteration, but got a second: step() has already been called since the last "
              "update().");
  if (record.stage == Stage::Ready) {
    unscale_gradients(optimizer, record);
  }
  if (!record.found_inf.empty()) {
    const auto [found, scale] = read(record.found_inf, scale_);
    result.scale = scale;
    if (found) {
      result.status = StepStatus::Skipped;
      explain_skip(gradients_of(kStep, optimizer), record, result);
    } else {
      result.status = StepStatus::Stepped;
      result.loss = optimizer.step();
    }
  }
  record.stage = Stage::Stepped;
  return result;
}

void GradScaler::explain_skip(const std::vector<Gradient>& gradients, const OptimizerRecord& record,
                              StepResult& result) {
  for (const auto& gradient : gradients) {
    result.reason = fault_of(gradient.values);
    if (result.reason != SkipReason::None) {
      result.param_group = gradient.group;
      result.param_index = gradient.index;
      result.param_name = name_of(gradient.parameter);
      result.amax = largest_finite(gradient.values);
      if (!record.found_inf_scaled.empty() && !read(record.found_inf_scaled, scale_).first) {
        result.reason = SkipReason::AfterUnscale;
      }
      break;
    }
  }
  result.at_floor = result.scale <= policy_.min_scale();
  if (result.at_floor && !warned_at_floor_) {
    warned_at_floor_ = true;
    warn_at_floor(result);
  }
}

void GradScaler::warn_at_floor(const StepResult& result) {
  TORCH_WARN(kStep, ": ", result, ", which is not above min_scale = ", policy_.min_scale(),
             ": the scale will not back off further, and steps like this one stay skipped. If these gradients are "
             "finite but beyond their dtype, lower the floor, for example min_scale(0x1p-10); if not, look for the "
             "first inf or NaN in the forward pass. This is said once.");
}

// --- update

void GradScaler::update() {
  if (!enabled_) {
    return;
  }
  require_scale(kUpdate);
  TORCH_CHECK(!iteration_->empty(), kUpdate,
              ": expected unscale_() or step() since the last update(), but got neither: No inf checks were recorded "
              "prior to update.");
  std::vector<Tensor> found_inf;
  for (const auto& found : iteration_->found_inf()) {
    found_inf.push_back(moved(found, scale_.device()));
  }
  if (!found_inf.empty()) {
    policy_.update_(scale_, growth_tracker_, at::stack(found_inf).sum());
  }
  iteration_->clear();
}

void GradScaler::update(double new_scale) {
  if (!enabled_) {
    return;
  }
  require_scale(kUpdate);
  const double value = ScalePolicy::check_scale("new_scale", new_scale);
  if (scale_.defined()) {
    scale_.fill_(value);
  }
  init_scale_ = value;
  given_below_one_ = value < 1;
  iteration_->clear();
}

void GradScaler::update(const Tensor& new_scale) {
  if (!enabled_) {
    return;
  }
  TORCH_CHECK_VALUE(new_scale.defined() && new_scale.numel() == 1, kUpdate,
                    ": expected new_scale of one element, but got ", new_scale.defined() ? new_scale.numel() : 0);
  TORCH_CHECK_TYPE(at::isFloatingType(new_scale.scalar_type()), kUpdate,
                   ": expected new_scale of a floating point dtype, but got ", new_scale.scalar_type());
  TORCH_CHECK_VALUE(!new_scale.requires_grad(), kUpdate,
                    ": expected new_scale without requires_grad, but got one that requires it");
  TORCH_CHECK_VALUE(new_scale.device().type() == device_, kUpdate, ": expected new_scale on a device of type ", device_,
                    ", but got ", new_scale.device());
  update(new_scale.item<double>());
}

double GradScaler::get_scale() const {
  if (!enabled_) {
    return 1;
  }
  return scale_.defined() ? scale_.item<float>() : init_scale_;
}

int64_t GradScaler::get_growth_tracker() const {
  if (!enabled_) {
    return 0;
  }
  return growth_tracker_.defined() ? growth_tracker_.item<int32_t>() : init_growth_tracker_;
}

// --- names

void GradScaler::name_parameters(const torch::OrderedDict<std::string, Tensor>& named) {
  for (const auto& item : named) {
    names_.insert_or_assign(item.value().unsafeGetTensorImpl(),
                            Named{WeakTensor(item.value().getIntrusivePtr()), item.key()});
  }
}

std::string GradScaler::name_of(const Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  return found == names_.end() ? std::string() : found->second.name;
}

}  // namespace allfinite::amp
