// Every schema of AllFinite, on one page. What an op computes, and its contract: include/allfinite/ops/.
//
// Names with an underscore in front are the parts of a public op: its forward with the saved statistics, and
// its backward. All are pt2-compliant: functional but for the mutations that the schema declares.
#include <torch/library.h>

TORCH_LIBRARY(allfinite, m) {
  const std::vector<at::Tag> pt2{at::Tag::pt2_compliant_tag};

  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float "
      "eps=1e-05) "
      "-> Tensor",
      pt2);
  m.def(
      "_layer_norm_forward(Tensor input, Tensor? weight, Tensor? bias, int ndim, float eps) -> (Tensor, "
      "Tensor)",
      pt2);
  m.def(
      "_layer_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor stats, int ndim, "
      "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      pt2);

  m.def("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor", pt2);
  m.def("_rms_norm_forward(Tensor input, Tensor? weight, int ndim, float eps) -> (Tensor, Tensor)", pt2);
  m.def(
      "_rms_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor stats, int ndim, bool[2] output_mask) "
      "-> (Tensor, Tensor)",
      pt2);

  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, Tensor? "
      "bias=None, float eps=1e-05) -> (Tensor output, Tensor residual_out)",
      pt2);
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) "
      "-> (Tensor output, Tensor residual_out)",
      pt2);
  m.def(
      "_add_norm_forward(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, int ndim, float eps, bool rms) "
      "-> (Tensor, Tensor, Tensor)",
      pt2);
  m.def(
      "_add_norm_backward(Tensor grad, Tensor? grad_residual_out, Tensor residual_out, Tensor? weight, Tensor? bias, "
      "Tensor stats, int ndim, bool rms, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      pt2);

  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100, str reduction=\"mean\", "
      "float label_smoothing=0.0, *, float z_loss=0.0) -> Tensor",
      pt2);
  // reduction: 0 none, 1 mean, 2 sum; stats: what backward needs of each row; denominator: fp64, of the mean, else 1.
  m.def(
      "_cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, int reduction, float "
      "label_smoothing, float z_loss) -> (Tensor loss, Tensor stats, Tensor denominator)",
      pt2);
  m.def(
      "_cross_entropy_backward(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor stats, Tensor "
      "denominator, int ignore_index, int reduction, float label_smoothing, float z_loss, bool[2] output_mask) -> "
      "(Tensor, Tensor)",
      pt2);

  m.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float "
      "dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, *, float softcap=0.0, "
      "int[]? window=None) -> Tensor",
      pt2);
  m.def(
      "scaled_dot_product_attention_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float "
      "dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False, *, float softcap=0.0, "
      "int[]? window=None) -> (Tensor output, Tensor lse)",
      pt2);
  // 4-D tensors [batch, heads, length, size]; left and right: the window with is_causal in it, -1 unbounded; seed:
  // int64 [1], there where dropout_p > 0.
  m.def(
      "_scaled_dot_product_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? seed, "
      "float dropout_p, float? scale, float softcap, int left, int right) -> (Tensor output, Tensor lse, Tensor stats)",
      pt2);
  m.def(
      "_scaled_dot_product_attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor "
      "value, Tensor? attn_mask, Tensor? seed, Tensor stats, float dropout_p, float? scale, float softcap, int left, "
      "int right, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      pt2);

  m.def("softmax(Tensor input, int dim, *, Tensor? mask=None, float scale=1.0) -> Tensor", pt2);
  // dim >= 0; mask has as many dimensions as input. numbers: from which the backward of 16-bit rows makes the
  // weights again, float64 [..., 2] with dim left out of input's sizes, if keep_numbers (as autograd sets it); else,
  // and for fp32 and fp64, empty. kept: these numbers; for fp32 and fp64 the output.
  m.def(
      "_softmax_forward(Tensor input, Tensor? mask, int dim, float scale, bool keep_numbers) -> (Tensor output, Tensor "
      "numbers)",
      pt2);
  m.def(
      "_softmax_backward(Tensor grad, Tensor input, Tensor? mask, Tensor kept, int dim, float scale, bool[2] "
      "output_mask) -> (Tensor, Tensor)",
      pt2);

  m.def("unscale_and_check_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale) -> ()", pt2);
  m.def(
      "grad_stats(Tensor[] grads) -> (Tensor found_inf, Tensor norm, Tensor amax, Tensor zeros, Tensor "
      "subnormals)",
      pt2);
  m.def("_grad_stats(Tensor[] grads) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", pt2);
  m.def("get_total_norm(Tensor[] tensors, float norm_type=2.0) -> Tensor", pt2);
  m.def("_get_total_norm(Tensor[] tensors, float norm_type) -> Tensor", pt2);
  m.def("clip_grads_with_norm_(Tensor(a!)[] grads, float max_norm, Tensor total_norm) -> ()", pt2);
  m.def(
      "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor found_inf, float growth_factor, "
      "float backoff_factor, int growth_interval, float min_scale, float max_scale) -> ()",
      pt2);
}
