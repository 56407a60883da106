// cross_entropy: autograd and meta kernels of the inner ops.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <vector>

#include "cpu/cross_entropy.h"
#include "ops/cross_entropy.h"
#include "ops/cross_entropy_reference.h"
#include "ops/op_node.h"

namespace allfinite {
namespace {

using namespace cross_entropy_parts;

std::tuple<Tensor, Tensor, Tensor> forward_autograd(const Tensor& input, const Tensor& target,
                                                    const OptionalTensor& weight, int64_t ignore_index,
                                                    int64_t reduction, double label_smoothing, double z_loss) {
  TORCH_CHECK_NOT_IMPLEMENTED(!weight || !torch::autograd::compute_requires_grad(*weight), kOp,
                              ": expected a weight that requires no gradient, but got one that does");
  const Options options{ignore_index, reduction, label_smoothing, z_loss};
  const auto run = [&]() -> variable_list {
    static const auto op = find_op<Forward>("allfinite::_cross_entropy_forward");
    auto [loss, stats, denominator] = op.call(input, target, weight, ignore_index, reduction, label_smoothing, z_loss);
    return {loss, stats, denominator};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    return {{input}, {target}, {or_undefined(weight)}, {outputs[1]}, {outputs[2]}};
  };
  const auto backward = [options](const variable_list& grads, const variable_list& saved,
                                  const std::vector<bool>& needs) -> variable_list {
    if (at::GradMode::is_enabled()) {
      auto [dx, dtarget] =
          reference_backward(grads[0], saved[0], saved[1], or_none(saved[2]), saved[4], options, needs[0], needs[1]);
      return {dx, dtarget, Tensor()};
    }
    static const auto op = find_op<Backward>("allfinite::_cross_entropy_backward");
    auto [dx, dtarget] =
        op.call(grads[0], saved[0], saved[1], or_none(saved[2]), saved[3], saved[4], options.ignore_index,
                options.reduction, options.label_smoothing, options.z_loss, {needs[0], needs[1]});
    return {dx, dtarget, Tensor()};
  };
  auto outputs = differentiable(kOp, {input, target, or_undefined(weight)}, 1, run, save, backward);
  return {outputs[0], outputs[1], outputs[2]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& input, const Tensor&, const OptionalTensor&, int64_t,
                                                int64_t reduction, double, double) {
  return empty_forward(input, reduction);
}

std::tuple<Tensor, Tensor> backward_meta(const Tensor&, const Tensor& input, const Tensor& target,
                                         const OptionalTensor&, const Tensor&, const Tensor&, int64_t, int64_t, double,
                                         double, std::array<bool, 2> output_mask) {
  return empty_backward(input, target, output_mask);
}

}  // namespace

namespace cross_entropy_parts {

std::tuple<Tensor, Tensor, Tensor> empty_forward(const Tensor& input, int64_t reduction) {
  auto shape = rows_shape(input);
  const auto options = input.options().dtype(compute_dtype(input));
  const Tensor loss =
      at::empty_symint(reduction == kNone ? c10::SymIntArrayRef(shape) : c10::SymIntArrayRef(), options);
  shape.emplace_back(cpu::kCrossEntropyStats);
  return {loss, at::empty_symint(shape, options), at::empty({}, options.dtype(at::kDouble))};
}

std::tuple<Tensor, Tensor> empty_backward(const Tensor& input, const Tensor& target, std::array<bool, 2> output_mask) {
  const auto like = [&](const Tensor& t) {
    auto shape = rows_shape(t);
    shape.emplace_back(t.sym_size(class_dim(t)));
    return at::empty_symint(shape, t.options()).movedim(-1, class_dim(t));
  };
  return {output_mask[0] ? like(input) : Tensor(),
          output_mask[1] && has_probabilities(input, target) ? like(target) : Tensor()};
}

}  // namespace cross_entropy_parts

TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_cross_entropy_forward", forward_autograd);
  m.impl("_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_cross_entropy_forward", forward_meta);
  m.impl("_cross_entropy_backward", backward_meta);
}

}  // namespace allfinite
