// Loss scaling for LibTorch optimizers: torch.amp.GradScaler for C++.
//
//   allfinite::amp::GradScaler scaler(allfinite::amp::GradScalerOptions().device(torch::kCUDA));
//   for (auto& [x, y] : batches) {
//     optimizer.zero_grad();
//     torch::Tensor loss;
//     {
//       allfinite::amp::AutocastGuard guard(torch::kCUDA, torch::kHalf);
//       loss = criterion(model->forward(x), y);
//     }
//     scaler.scale(loss).backward();
//     scaler.clip_grad_norm_(optimizer, 1.0);  // optional
//     scaler.step(optimizer);
//     scaler.update();  // once an iteration, after all optimizers
//   }
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "allfinite/amp/scale_policy.h"
#include "allfinite/amp/step_result.h"
#include "allfinite/export.h"

namespace allfinite::amp {

class Iteration;
struct Gradient;
struct OptimizerRecord;

// Options, with torch's defaults. Ranges: ScalePolicy; init_scale is finite and > 0.
struct GradScalerOptions {
  // A CUDA scaler on a machine without CUDA warns and is disabled.
  TORCH_ARG(c10::DeviceType, device) = c10::kCUDA;
  TORCH_ARG(double, init_scale) = 65536.0;
  TORCH_ARG(double, growth_factor) = 2.0;
  TORCH_ARG(double, backoff_factor) = 0.5;
  TORCH_ARG(int64_t, growth_interval) = 2000;
  TORCH_ARG(bool, enabled) = true;
  // The scale never backs off below this one, nor grows above the next.
  TORCH_ARG(double, min_scale) = 1.0;
  TORCH_ARG(double, max_scale) = 16777216.0;
};

// What a scaler keeps from one iteration to the next.
struct GradScalerState {
  double scale;
  int64_t growth_tracker;
  ScalePolicy policy;
};

// Semantics are those of torch.amp.GradScaler, for all parameter groups of any number of optimizers, each of
// which skips on its own. Within an iteration an optimizer goes from ready to unscaled (unscale_) to stepped
// (step); update() makes all of them ready again.
//
// Gradients: fp16, bf16, fp32, fp64, complex64 and complex128, dense or sparse COO, on any devices. They are
// unscaled in place in their own dtype: a 16-bit gradient below its range becomes 0, so keep parameters in
// fp32, as autocast does. Sparse gradients are coalesced first: duplicates that overflow in their sum are found.
// A gradient is non-finite if it is so before or after it is unscaled. Memory that several gradients share is
// unscaled once.
//
// An optimizer is known by its address together with a weak reference to its first parameter: a new optimizer
// that gets the address of one that is gone does not take over its state. Do not move an optimizer between
// unscale_ and update.
//
// Errors are c10::Error (a Python RuntimeError) for calls out of order, c10::ValueError and its relatives for
// bad arguments; none leaves anything half-written. A disabled scaler passes everything through. Not thread-safe.
class ALLFINITE_API GradScaler {
 public:
  // c10::ValueError: an option out of its range.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  // outputs * scale, differentiable, any shape and device. A 16-bit tensor gives fp32 (65536 is beyond fp16),
  // an integer tensor too. NaN and inf pass through. The first call puts scale and tracker on its device.
  at::Tensor scale(const at::Tensor& outputs);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  // Divides the optimizer's gradients by the scale and notes, on their devices and without a host sync, whether
  // one is not finite. Once per optimizer and iteration, before step. c10::Error: called twice, after step,
  // before any scale(), or for a parameter whose gradient another optimizer has unscaled since the last update.
  void unscale_(torch::optim::Optimizer& optimizer);

  // Clips the optimizer's unscaled gradients, which it unscales if that was not done, to the L2 norm max_norm.
  // Returns the norm before, a float64 scalar tensor; no host sync. A norm that is not finite changes nothing,
  // and step will skip. max_norm: >= 0, infinity allowed; c10::ValueError.
  at::Tensor clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm);

  // Unscales, if that was not done, and steps unless a gradient was non-finite then. Waits for the device once;
  // a skip more often, to find the parameter.
  // The first skip at min_scale warns. c10::Error: called twice since the last update.
  StepResult step(torch::optim::Optimizer& optimizer);
  // The same. A closure is c10::Error unless it is empty or the scaler disabled: it would run on scaled losses.
  StepResult step(torch::optim::Optimizer& optimizer, const torch::optim::Optimizer::LossClosure& closure);

  // Moves the scale by the policy, from all unscale_ and step calls since the last update, on the device and
  // without a host sync. After nothing but steps without gradients the scale stays. c10::Error: neither
  // unscale_ nor step was called.
  void update();
  // Sets the scale; the growth tracker stays. new_scale: finite, > 0 (c10::ValueError); as a tensor: one element
  // of any shape, floating point, without requires_grad, on a device of the scaler's type (read by the host).
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  // The values of now; these two wait for the device. A disabled scaler: 1 and 0.
  double get_scale() const;
  int64_t get_growth_tracker() const;

  const ScalePolicy& policy() const { return policy_; }
  void set_policy(const ScalePolicy& policy) { policy_ = policy; }
  double get_growth_factor() const { return policy_.growth_factor(); }
  double get_backoff_factor() const { return policy_.backoff_factor(); }
  int64_t get_growth_interval() const { return policy_.growth_interval(); }
  double get_min_scale() const { return policy_.min_scale(); }
  double get_max_scale() const { return policy_.max_scale(); }
  void set_growth_factor(double value) { policy_.set_growth_factor(value); }
  void set_backoff_factor(double value) { policy_.set_backoff_factor(value); }
  void set_growth_interval(int64_t value) { policy_.set_growth_interval(value); }
  void set_min_scale(double value) { policy_.set_min_scale(value); }
  void set_max_scale(double value) { policy_.set_max_scale(value); }
  bool is_enabled() const { return enabled_; }
  c10::DeviceType device() const { return device_; }

  // Names for messages and StepResult, such as model->named_parameters(). Adds to those given before.
  void name_parameters(const torch::OrderedDict<std::string, at::Tensor>& named);

  // state() waits for the device. load_state checks every value first (c10::ValueError) and then takes all; the
  // next scale, unscale_ or step puts them on its device. A disabled scaler ignores load_state.
  GradScalerState state() const;
  void load_state(const GradScalerState& state);

  // What torch::save(scaler, ...) and torch::load(scaler, ...) call. load: c10::Error or c10::ValueError, and
  // nothing is changed, for an archive that is not of a scaler, that was saved from a disabled one, or whose
  // values no scaler can have.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  struct Named {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter;
    std::string name;
  };

  void place_scale(const at::Device& device);
  void require_scale(const char* method) const;
  void unscale_gradients(torch::optim::Optimizer& optimizer, OptimizerRecord& record);
  bool scale_may_be_below_one() const;
  void explain_skip(const std::vector<Gradient>& gradients, const OptimizerRecord& record, StepResult& result);
  void warn_at_floor(const StepResult& result);
  std::string name_of(const at::Tensor& parameter) const;

  c10::DeviceType device_;
  bool enabled_;
  ScalePolicy policy_;
  double init_scale_;  // what the two tensors start with
  int64_t init_growth_tracker_ = 0;
  at::Tensor scale_;           // float32 scalar; undefined before the first use
  at::Tensor growth_tracker_;  // int32 scalar
  bool loaded_ = false;        // unscale_ and step may create the tensors
  bool warned_at_floor_ = false;
  bool given_below_one_;                  // the last scale that came from a user is below 1
  std::unique_ptr<Iteration> iteration_;  // since the last update
  std::unordered_map<const c10::TensorImpl*, Named> names_;
};

ALLFINITE_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                          const GradScaler& scaler);
ALLFINITE_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, GradScaler& scaler);

}  // namespace allfinite::amp
