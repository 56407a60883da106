// The ops as plain functions: what Python calls where nothing but the dispatcher need see the call. Against
// torch.ops.allfinite this saves the boxing of every argument, 2 to 3 us a call and 0.1 us for each tensor of a list.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <vector>

#include "allfinite/ops.h"
#include "bindings.h"

namespace allfinite::python {

namespace py = pybind11;
using at::Tensor;

void bind_ops(py::module_& parent) {
  auto m = parent.def_submodule("ops", "The ops, past torch.ops.allfinite; arguments by position.");
  // Kernels run without the interpreter's lock, as torch's do.
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("layer_norm", &layer_norm, Unlocked());
  m.def("rms_norm", &rms_norm, Unlocked());
  m.def("add_layer_norm", &add_layer_norm, Unlocked());
  m.def("add_rms_norm", &add_rms_norm, Unlocked());
  m.def("softmax", &softmax, Unlocked());
  m.def("cross_entropy", &cross_entropy, Unlocked());

  const auto attention = [](auto function) {
    return
        [function](const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& attn_mask,
                   double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, double softcap,
                   const std::optional<std::vector<int64_t>>& window) {
          return function(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap,
                          window ? at::OptionalIntArrayRef(*window) : at::OptionalIntArrayRef());
        };
  };
  m.def("scaled_dot_product_attention", attention(&scaled_dot_product_attention), Unlocked());
  m.def("scaled_dot_product_attention_lse", attention(&scaled_dot_product_attention_lse), Unlocked());

  m.def(
      "unscale_and_check_",
      [](const std::vector<Tensor>& grads, const Tensor& found_inf, const Tensor& inv_scale) {
        unscale_and_check_(grads, found_inf, inv_scale);
      },
      Unlocked());
  m.def(
      "grad_stats",
      [](const std::vector<Tensor>& grads) {
        const GradStats stats = grad_stats(grads);
        return std::tuple(stats.found_inf, stats.norm, stats.amax, stats.zeros, stats.subnormals);
      },
      Unlocked());
  m.def(
      "get_total_norm",
      [](const std::vector<Tensor>& tensors, double norm_type) { return get_total_norm(tensors, norm_type); },
      Unlocked());
  m.def(
      "clip_grads_with_norm_",
      [](const std::vector<Tensor>& grads, double max_norm, const Tensor& total_norm) {
        clip_grads_with_norm_(grads, max_norm, total_norm);
      },
      Unlocked());
  m.def("update_scale_", &update_scale_, Unlocked());
}

}  // namespace allfinite::python
