// What the tests of AllFinite's amp share: parameters with given gradients, scalers, caught errors and warnings.
#pragma once
#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "allfinite/amp/grad_scaler.h"

namespace allfinite::test {

using at::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline Tensor values(std::initializer_list<double> list, at::ScalarType dtype = at::kFloat) {
  return at::tensor(std::vector<double>(list), at::kDouble).to(dtype);
}

// A parameter of zeros with `gradient`.
inline Tensor parameter(const Tensor& gradient) {
  Tensor result = at::zeros(gradient.sizes(), gradient.options().layout(at::kStrided)).requires_grad_();
  result.mutable_grad() = gradient;
  return result;
}

inline torch::optim::SGD sgd(std::vector<Tensor> parameters, double lr = 1.0) {
  return torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(lr));
}

// One group for each list.
inline torch::optim::SGD sgd_groups(const std::vector<std::vector<Tensor>>& groups) {
  std::vector<torch::optim::OptimizerParamGroup> result(groups.begin(), groups.end());
  return torch::optim::SGD(result, torch::optim::SGDOptions(1.0));
}

inline amp::GradScalerOptions cpu_options(double init_scale = 65536) {
  return amp::GradScalerOptions().device(at::kCPU).init_scale(init_scale);
}

// A CPU scaler that has scaled something, so that unscale_ and step may be called.
inline amp::GradScaler used_scaler(const amp::GradScalerOptions& options) {
  amp::GradScaler scaler(options);
  scaler.scale(at::ones({}));
  return scaler;
}
inline amp::GradScaler used_scaler(double init_scale = 65536) {
  return used_scaler(cpu_options(init_scale));
}

// The text of the error that `f` must raise.
template <class Error = c10::Error, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// Collects torch's warnings while it lives.
class Warnings : c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace allfinite::test
