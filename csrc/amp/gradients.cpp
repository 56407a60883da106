// How an optimizer's gradients are collected, unscaled, clipped and looked at; all maths is in ops.
#include "amp/gradients.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "amp/device_ops.h"

namespace allfinite::amp {

using at::Tensor;

namespace {

void check_gradient(const char* method, const Tensor& gradient, int64_t group, int64_t index) {
  const auto dtype = gradient.scalar_type();
  TORCH_CHECK_TYPE(at::isFloatingType(dtype) || at::isComplexType(dtype), method,
                   ": expected floating point or complex gradients, but got ", dtype, " in parameter group ", group,
                   ", index ", index);
  TORCH_CHECK_NOT_IMPLEMENTED(gradient.layout() == at::kStrided || gradient.layout() == at::kSparse, method,
                              ": expected dense or sparse COO gradients, but got layout ", gradient.layout(),
                              " in parameter group ", group, ", index ", index);
}

Gradient make_gradient(const Tensor& parameter, int64_t group, int64_t index) {
  Gradient result{parameter, parameter.grad(), Tensor(), group, index};
  if (result.values.is_sparse()) {
    Tensor sparse = result.values;
    if (!sparse.is_coalesced()) {
      sparse = result.coalesced = sparse.coalesce();
    }
    result.values = sparse._values();
  }
  return result;
}

}  // namespace

std::vector<Gradient> gradients_of(const char* method, const torch::optim::Optimizer& optimizer) {
  const c10::NoGradGuard no_grad;
  const auto& groups = optimizer.param_groups();
  const auto for_each = [&](auto&& visit) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& parameters = groups[g].params();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].defined() && parameters[i].grad().defined()) {
          visit(parameters[i], static_cast<int64_t>(g), static_cast<int64_t>(i));
        }
      }
    }
  };
  for_each([&](const Tensor& p, int64_t g, int64_t i) { check_gradient(method, p.grad(), g, i); });
  std::vector<Gradient> result;
  for_each([&](const Tensor& p, int64_t g, int64_t i) { result.push_back(make_gradient(p, g, i)); });
  return result;
}

void store_coalesced(const std::vector<Gradient>& gradients) {
  for (const auto& gradient : gradients) {
    if (gradient.coalesced.defined()) {
      gradient.parameter.mutable_grad() = gradient.coalesced;
    }
  }
}

std::vector<DeviceGradients> by_device(const std::vector<Gradient>& gradients) {
  std::vector<DeviceGradients> result;
  for (const auto& gradient : gradients) {
    const auto device = gradient.values.device();
    auto entry = std::find_if(result.begin(), result.end(), [&](const auto& e) { return e.device == device; });
    if (entry == result.end()) {
      entry = result.insert(entry, {device, {}});
    }
    entry->values.push_back(gradient.values);
  }
  return result;
}

SkipReason fault_of(const Tensor& values) {
  if (at::isnan(values).any().item<bool>()) {
    return SkipReason::NaN;
  }
  return at::isfinite(values).all().item<bool>() ? SkipReason::None : SkipReason::Inf;
}

double largest_finite(const Tensor& values) {
  const Tensor magnitude = components(values).abs();
  const Tensor finite = at::where(at::isfinite(magnitude), magnitude, at::zeros_like(magnitude));
  return finite.numel() == 0 ? 0 : finite.max().to(at::kDouble).item<double>();
}

}  // namespace allfinite::amp
