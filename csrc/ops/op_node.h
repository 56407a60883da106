// The one autograd node of AllFinite's ops, and the function that puts it on the tape.
//
// Not torch::autograd::Function: that refuses torch.func (grad, vmap of grad, jacrev). This is what torch's
// own generated code does.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/autograd/FunctionsManual.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/op.h"

namespace allfinite {

using torch::autograd::variable_list;

struct OpNode : torch::autograd::Node {
  // grads: one per differentiable output, undefined where nothing arrived (at least one is defined).
  // needs: one per input, whether its gradient is asked for. Returns one gradient per input, undefined where
  // not. Runs with grad mode on under create_graph: it must then return a differentiable expression, or
  // refuse by name.
  using Backward = std::function<variable_list(const variable_list& grads, const variable_list& saved,
                                               const std::vector<bool>& needs)>;

  variable_list apply(variable_list&& grads) override {
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& variable : saved) {
        tensors.push_back(variable.unpack(getptr()));  // raises torch's "backward a second time" error
      }
    }
    std::vector<bool> needs;
    for (size_t i = 0; i < num_outputs(); ++i) {
      needs.push_back(task_should_compute_output(i));
    }
    for (const auto& grad : grads) {
      if (grad.defined()) {
        return backward(grads, tensors, needs);
      }
    }
    return variable_list(num_outputs());
  }
  // Emptied, not removed: unpacking an empty one is the error that a second backward must raise.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) {
      variable.reset_data();
    }
  }
  std::string name() const override { return label; }

  std::vector<torch::autograd::SavedVariable> saved;
  Backward backward;
  std::string label;
};

// Nodes live in a shared_ptr up to torch 2.1x and in an intrusive_ptr after it: the header knows, not the
// version.
template <class N>
auto make_node(int)
    -> std::enable_if_t<std::is_same_v<decltype(std::declval<N>().getptr()), c10::intrusive_ptr<torch::autograd::Node>>,
                        c10::intrusive_ptr<N>> {
  return c10::make_intrusive<N>();
}
template <class N>
std::shared_ptr<N> make_node(long) {
  return std::make_shared<N>();
}

// A tensor to keep for backward; `output`: it is one of the differentiable outputs.
struct Saved {
  Tensor tensor;
  bool output = false;
};

// Runs `forward` below autograd and, where a gradient is needed, makes its first `num_differentiable` outputs
// depend on `inputs` (undefined tensors allowed) through one node. save(outputs) names what backward gets.
template <class Forward, class Save>
variable_list differentiable(const char* op, const variable_list& inputs, size_t num_differentiable, Forward forward,
                             Save save, OpNode::Backward backward) {
  bool needed = false;
  for (const auto& t : inputs) {
    // Without this check a tangent would silently become zero.
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(t), op,
                                ": expected reverse-mode differentiation, but got a forward-mode tangent, which is "
                                "not supported.");
    needed |= torch::autograd::compute_requires_grad(t);
  }
  variable_list outputs;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = forward();
  }
  if (needed) {
    auto node = make_node<OpNode>(0);
    node->label = std::string(op) + "Backward";
    node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    node->backward = std::move(backward);
    for (size_t i = 0; i < num_differentiable; ++i) {
      torch::autograd::set_history(outputs[i], node);
    }
    // After set_history: an output that is saved as such must know its node, or node and output own each
    // other.
    for (const Saved& s : save(outputs)) {
      node->saved.emplace_back(s.tensor, s.output);
    }
  }
  return outputs;
}

}  // namespace allfinite
