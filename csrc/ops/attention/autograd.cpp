// scaled_dot_product_attention: autograd and meta kernels of the inner ops.
//
// Double backward is refused by name: the backward op puts a node on the tape that raises when it runs (only then,
// because torch.func.grad asks for a graph that it does not use).
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "ops/attention/attention.h"
#include "ops/op_node.h"

namespace allfinite::attention {

std::tuple<Tensor, Tensor, Tensor> call_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const OptionalTensor& mask, const OptionalTensor& seed,
                                                const Options& o) {
  static const auto op = find_op<Forward>("allfinite::_scaled_dot_product_attention_forward");
  return op.call(query, key, value, mask, seed, o.dropout_p, o.scale, o.softcap, o.left, o.right);
}

namespace {

const auto& backward_op() {
  static const auto op = find_op<Backward>("allfinite::_scaled_dot_product_attention_backward");
  return op;
}

std::tuple<Tensor, Tensor, Tensor> forward_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                    const OptionalTensor& mask, const OptionalTensor& seed,
                                                    double dropout_p, std::optional<double> scale, double softcap,
                                                    int64_t left, int64_t right) {
  const Options options{dropout_p, scale, softcap, left, right};
  const auto run = [&]() -> variable_list {
    auto [output, lse, stats] = call_forward(query, key, value, mask, seed, options);
    return {output, lse, stats};
  };
  const auto save = [&](const variable_list& outputs) -> std::vector<Saved> {
    return {{query}, {key}, {value}, {or_undefined(mask)}, {or_undefined(seed)}, {outputs[2]}};
  };
  const auto backward = [options](const variable_list& grads, const variable_list& saved,
                                  const std::vector<bool>& needs) -> variable_list {
    auto [dq, dk, dv, dmask] =
        backward_op().call(or_none(grads[0]), or_none(grads[1]), saved[0], saved[1], saved[2], or_none(saved[3]),
                           or_none(saved[4]), saved[5], options.dropout_p, options.scale, options.softcap, options.left,
                           options.right, {needs[0], needs[1], needs[2], needs[3]});
    return {dq, dk, dv, dmask};
  };
  auto outputs = differentiable(kOp, {query, key, value, or_undefined(mask)}, 2, run, save, backward);
  return {outputs[0], outputs[1], outputs[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_autograd(
    const OptionalTensor& grad_output, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& stats, double dropout_p,
    std::optional<double> scale, double softcap, int64_t left, int64_t right, std::array<bool, 4> output_mask) {
  const auto run = [&]() -> variable_list {
    auto [dq, dk, dv, dmask] = backward_op().call(grad_output, grad_lse, query, key, value, mask, seed, stats,
                                                  dropout_p, scale, softcap, left, right, output_mask);
    return {dq, dk, dv, dmask};
  };
  const auto save = [](const variable_list&) -> std::vector<Saved> { return {}; };
  const auto refuse = [](const variable_list&, const variable_list&, const std::vector<bool>&) -> variable_list {
    TORCH_CHECK_NOT_IMPLEMENTED(false, kOp, ": expected one backward, but got a double backward (a gradient of its ",
                                "gradient), which is not supported");
  };
  auto outputs =
      differentiable(kOp, {or_undefined(grad_output), or_undefined(grad_lse), query, key, value, or_undefined(mask)}, 4,
                     run, save, refuse);
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

// --- meta ----------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward_meta(const Tensor& query, const Tensor&, const Tensor& value,
                                                const OptionalTensor& mask, const OptionalTensor&, double,
                                                std::optional<double>, double, int64_t, int64_t) {
  auto shape = query.sym_sizes().vec();
  shape.back() = value.sym_size(-1);
  const auto options = query.options();
  const Tensor output = at::empty_symint(shape, options);
  shape.back() = value.sym_size(-1) + 2;  // and the output before it was rounded
  const Tensor stats = at::empty_symint(shape, options.dtype(compute_dtype(query, mask)));
  shape.pop_back();
  return {output, at::empty_symint(shape, options.dtype(lse_dtype(query))), stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_meta(const OptionalTensor&, const OptionalTensor&,
                                                         const Tensor& query, const Tensor& key, const Tensor& value,
                                                         const OptionalTensor& mask, const OptionalTensor&,
                                                         const Tensor&, double, std::optional<double>, double, int64_t,
                                                         int64_t, std::array<bool, 4> output_mask) {
  const auto like = [&](int i, const Tensor& t) {
    return output_mask[i] ? at::empty_symint(t.sym_sizes(), t.options()) : Tensor();
  };
  return {like(0, query), like(1, key), like(2, value), mask ? like(3, *mask) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_scaled_dot_product_attention_forward", forward_autograd);
  m.impl("_scaled_dot_product_attention_backward", backward_autograd);
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_scaled_dot_product_attention_forward", forward_meta);
  m.impl("_scaled_dot_product_attention_backward", backward_meta);
}

}  // namespace allfinite::attention
