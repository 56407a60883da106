// The gradients of an optimizer, as the GradScaler works on them: checked, dense, and per device.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "allfinite/amp/step_result.h"

namespace allfinite::amp {

struct Gradient {
  at::Tensor parameter;
  at::Tensor values;     // strided: the gradient itself, or the values of the coalesced sparse gradient
  at::Tensor coalesced;  // what has to take the place of a sparse gradient with duplicates; else undefined
  int64_t group;
  int64_t index;  // in the group
};

// Of all groups, in order; parameters without a gradient are left out. Changes nothing. c10::TypeError for a
// dtype that is neither floating point nor complex, NotImplementedError for a layout that is neither strided nor COO.
std::vector<Gradient> gradients_of(const char* method, const torch::optim::Optimizer& optimizer);

// Puts coalesced sparse gradients into their parameters.
void store_coalesced(const std::vector<Gradient>& gradients);

struct DeviceGradients {
  at::Device device;
  std::vector<at::Tensor> values;
};
std::vector<DeviceGradients> by_device(const std::vector<Gradient>& gradients);

// What is wrong with a gradient: None, Inf or NaN; waits for its device.
SkipReason fault_of(const at::Tensor& values);
// Largest finite magnitude, 0 if there is none; waits for its device.
double largest_finite(const at::Tensor& values);

// "parameter group 0, index 3 (encoder.weight)"
std::string place_of(int64_t group, int64_t index, const std::string& name);

}  // namespace allfinite::amp
