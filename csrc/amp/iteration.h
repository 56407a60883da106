// What a GradScaler has done since its last update: the stage of each optimizer, and what has been unscaled.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <vector>

#include "amp/gradients.h"

namespace allfinite::amp {

// Keeps the address of a tensor from being used again, without keeping its memory.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

enum class Stage { Ready, Unscaled, Stepped };

struct OptimizerRecord {
  const torch::optim::Optimizer* optimizer;
  WeakTensor first_parameter;
  Stage stage = Stage::Ready;
  std::vector<at::Tensor> found_inf;         // one per device, float32 scalars
  std::vector<at::Tensor> found_inf_scaled;  // the same before unscaling; only where the scale may be below 1
};

class Iteration {
 public:
  // The record of an optimizer, a new one if there is none. An optimizer is the same as before if its address and
  // its first parameter are: the address alone may belong to a new one.
  OptimizerRecord& record_of(const torch::optim::Optimizer& optimizer) {
    const WeakTensor first = first_parameter(optimizer);
    for (auto& record : records_) {
      if (record.optimizer == &optimizer && record.first_parameter == first) {
        return record;
      }
    }
    return records_.emplace_back(OptimizerRecord{&optimizer, first, Stage::Ready, {}, {}});
  }

  // Whether a parameter, or its gradient, has been unscaled.
  bool contains(const at::Tensor& t) const { return unscaled_.count(t.unsafeGetTensorImpl()) != 0; }
  void add(const at::Tensor& t) { unscaled_.emplace(t.unsafeGetTensorImpl(), WeakTensor(t.getIntrusivePtr())); }

  // Whether nothing has been unscaled or stepped.
  bool empty() const {
    return std::all_of(records_.begin(), records_.end(), [](const auto& r) { return r.stage == Stage::Ready; });
  }
  std::vector<at::Tensor> found_inf() const {
    std::vector<at::Tensor> result;
    for (const auto& record : records_) {
      result.insert(result.end(), record.found_inf.begin(), record.found_inf.end());
    }
    return result;
  }
  void clear() {
    records_.clear();
    unscaled_.clear();
  }

 private:
  static WeakTensor first_parameter(const torch::optim::Optimizer& optimizer) {
    for (const auto& group : optimizer.param_groups()) {
      if (!group.params().empty()) {
        return WeakTensor(group.params().front().getIntrusivePtr());
      }
    }
    return WeakTensor(at::Tensor().getIntrusivePtr());
  }

  std::deque<OptimizerRecord> records_;  // references stay valid
  std::unordered_map<const c10::TensorImpl*, WeakTensor> unscaled_;
};

}  // namespace allfinite::amp
