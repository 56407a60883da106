// What the ops refuse from C++, by class and text; the same as in Python (tests/python/test_bad_calls.py).
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "allfinite/ops/attention.h"
#include "allfinite/ops/losses.h"
#include "allfinite/ops/norms.h"
#include "allfinite/ops/softmax.h"
#include "bad_calls.h"
#include "catch.h"

namespace {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
const std::string kFloats = "float16, bfloat16, float32 or float64, but got ";
const std::string kSparse = " to be a dense (strided) tensor, but got layout Sparse";
const std::string kBeside = " or float32 beside a 16-bit input, but got ";

// norm(input, shape, weight, eps), whatever else the op takes.
template <class Norm>
void check_norm(const std::string& op, Norm&& norm) {
  const Tensor x = at::ones({2, 4}), w = at::ones({4}), half = x.to(at::kHalf);
  const std::string eps = "expected eps >= 0 and finite, but got ",
                    shape = "expected input to end in normalized_shape ";
  check_refused(
      op,
      {
          {[&] { norm(Tensor(), {4}, w, 0.0); }, "TypeError", "expected input to be a tensor, but got none"},
          {[&] { norm(x.to(at::kLong), {4}, w, 0.0); }, "TypeError", "expected input to be " + kFloats + "Long"},
          {[&] { norm(x.to(at::kComplexFloat), {4}, w, 0.0); }, "TypeError",
           "expected input to be " + kFloats + "ComplexFloat"},
          {[&] { norm(x.to_sparse(), {4}, w, 0.0); }, "NotImplementedError", "expected input" + kSparse},
          {[&] { norm(x, {}, w, 0.0); }, "ValueError",
           "expected normalized_shape of at least one dimension, but got []"},
          {[&] { norm(x, {5}, w, 0.0); }, "ValueError", shape + "[5], but got input of shape [2, 4]"},
          {[&] { norm(x, {1, 2, 4}, w, 0.0); }, "ValueError", shape + "[1, 2, 4], but got input of shape [2, 4]"},
          {[&] { norm(x, {4}, at::ones({3}), 0.0); }, "ValueError", "expected weight of shape [4], but got [3]"},
          {[&] { norm(x, {4}, at::ones({1, 4}), 0.0); }, "ValueError", "expected weight of shape [4], but got [1, 4]"},
          {[&] { norm(x, {4}, w.to(at::kHalf), 0.0); }, "TypeError",
           "expected weight of input's dtype, Float," + kBeside + "Half"},
          {[&] { norm(half, {4}, w.to(at::kBFloat16), 0.0); }, "TypeError",
           "expected weight of input's dtype, Half," + kBeside + "BFloat16"},
          {[&] { norm(x, {4}, w.to(at::kMeta), 0.0); }, "Error",
           "expected weight on the device of input, cpu, but got meta"},
          {[&] { norm(x, {4}, w.to_sparse(), 0.0); }, "NotImplementedError", "expected weight" + kSparse},
          {[&] { norm(x, {4}, w, -1.0); }, "ValueError", eps + "-1"},
          {[&] { norm(x, {4}, w, kNan); }, "ValueError", eps + "nan"},
          {[&] { norm(x, {4}, w, kInf); }, "ValueError", eps + "inf"},
      },
      {x, w, half});
}

// norm(input, residual)
template <class Norm>
void check_residual(const std::string& op, Norm&& norm) {
  const Tensor x = at::ones({2, 4}), half = x.to(at::kHalf);
  const std::string shape = "expected residual of input's shape, [2, 4], but got ";
  const std::string dtype = "expected residual of input's dtype, ";
  check_refused(
      op,
      {
          {[&] { norm(x, Tensor()); }, "TypeError", "expected residual to be a tensor, but got none"},
          {[&] { norm(x, at::ones({4})); }, "ValueError", shape + "[4]"},
          {[&] { norm(x, at::ones({1, 4})); }, "ValueError", shape + "[1, 4]"},
          {[&] { norm(x, half); }, "TypeError", dtype + "Float," + kBeside + "Half"},
          {[&] { norm(half, x.to(at::kDouble)); }, "TypeError", dtype + "Half," + kBeside + "Double"},
          {[&] { norm(half, x.to(at::kBFloat16)); }, "TypeError", dtype + "Half," + kBeside + "BFloat16"},
          {[&] { norm(x, x.to(at::kMeta)); }, "Error", "expected residual on the device of input, cpu, but got meta"},
          {[&] { norm(x, x.to_sparse()); }, "NotImplementedError", "expected residual" + kSparse},
      },
      {x, half});
}

}  // namespace

TEST_CASE("bad calls: norms") {
  using Shape = at::IntArrayRef;
  const Tensor x = at::ones({2, 4}), w = at::ones({4});
  check_norm("allfinite::layer_norm", [](const Tensor& input, Shape shape, const Tensor& weight, double eps) {
    allfinite::layer_norm(input, shape, weight, {}, eps);
  });
  check_norm("allfinite::rms_norm", [](const Tensor& input, Shape shape, const Tensor& weight, double eps) {
    allfinite::rms_norm(input, shape, weight, eps);
  });
  check_norm("allfinite::add_layer_norm", [](const Tensor& input, Shape shape, const Tensor& weight, double eps) {
    allfinite::add_layer_norm(input, input, shape, weight, {}, eps);
  });
  check_norm("allfinite::add_rms_norm", [](const Tensor& input, Shape shape, const Tensor& weight, double eps) {
    allfinite::add_rms_norm(input, input, shape, weight, eps);
  });
  check_residual("allfinite::add_layer_norm",
                 [](const Tensor& input, const Tensor& residual) { allfinite::add_layer_norm(input, residual, {4}); });
  check_residual("allfinite::add_rms_norm",
                 [](const Tensor& input, const Tensor& residual) { allfinite::add_rms_norm(input, residual, {4}); });
  const BadCall shape{[&] { allfinite::layer_norm(x, {4}, w, at::ones({1, 4})); }, "ValueError",
                      "expected bias of shape [4], but got [1, 4]"};
  const BadCall dtype{[&] { allfinite::layer_norm(x, {4}, w, w.to(at::kDouble)); }, "TypeError",
                      "expected bias of input's dtype, Float," + kBeside + "Double"};
  check_refused("allfinite::layer_norm", {shape, dtype}, {x, w});
}

TEST_CASE("bad calls: softmax") {
  using allfinite::softmax;
  const Tensor x = at::ones({2, 3, 4});
  const std::string shape = "expected mask to broadcast to input's shape, ";
  check_refused(
      "allfinite::softmax",
      {
          {[&] { softmax(Tensor(), 0); }, "TypeError", "expected input to be a tensor, but got none"},
          {[&] { softmax(x.to(at::kLong), 0); }, "TypeError", "expected input to be " + kFloats + "Long"},
          {[&] { softmax(x.to_sparse(), 0); }, "NotImplementedError", "expected input" + kSparse},
          {[&] { softmax(x, 3); }, "IndexError", "expected dim in [-3, 2], but got 3"},
          {[&] { softmax(x, -4); }, "IndexError", "expected dim in [-3, 2], but got -4"},
          {[&] { softmax(at::ones({}), 1); }, "IndexError", "expected dim in [-1, 0], but got 1"},
          {[&] { softmax(x, 1, at::ones({4}, at::kLong)); }, "TypeError",
           "expected mask to be bool (True: takes part) or floating (added), but got Long"},
          {[&] { softmax(x, 1, at::ones({3})); }, "ValueError", shape + "[2, 3, 4], but got [3]"},
          {[&] { softmax(x.slice(0, 0, 1), 1, x); }, "ValueError", shape + "[1, 3, 4], but got [2, 3, 4]"},
          {[&] { softmax(x, 1, x.unsqueeze(0)); }, "ValueError", shape + "[2, 3, 4], but got [1, 2, 3, 4]"},
          {[&] { softmax(x, 1, x.to(at::kMeta)); }, "Error", "expected mask on the device of input, cpu, but got meta"},
          {[&] { softmax(x, 1, x.to_sparse()); }, "NotImplementedError", "expected mask" + kSparse},
          {[&] { softmax(x, 1, {}, kNan); }, "ValueError", "expected a finite scale, but got nan"},
          {[&] { softmax(x, 1, {}, -kInf); }, "ValueError", "expected a finite scale, but got -inf"},
      },
      {x});
}

TEST_CASE("bad calls: cross_entropy") {
  const auto ce = [](const Tensor& input, const Tensor& target, const std::optional<Tensor>& weight = {},
                     const char* reduction = "mean", double smoothing = 0, double z_loss = 0) {
    allfinite::cross_entropy(input, target, weight, -100, reduction, smoothing, z_loss);
  };
  const Tensor x = at::ones({2, 4}), t = at::zeros({2}, at::kLong), w = at::ones({4});
  const std::string target = "expected target of shape [2] (class indices) or [2, 4] (class probabilities), but got ";
  const std::string index = "expected classes in [0, 4) or ignore_index -100, but got ";
  check_refused(
      "allfinite::cross_entropy",
      {
          {[&] { ce(Tensor(), t); }, "TypeError", "expected input to be a tensor, but got none"},
          {[&] { ce(x, Tensor()); }, "TypeError", "expected target to be a tensor, but got none"},
          {[&] { ce(x.to(at::kLong), t); }, "TypeError", "expected input to be " + kFloats + "Long"},
          {[&] { ce(x.to_sparse(), t); }, "NotImplementedError", "expected input" + kSparse},
          {[&] { ce(x, x.to_sparse()); }, "NotImplementedError", "expected target" + kSparse},
          {[&] { ce(at::ones({}), at::zeros({}, at::kLong)); }, "ValueError",
           "expected input of shape (C), (N, C) or (N, C, d1, ...), but got []"},
          {[&] { ce(x, at::zeros({3}, at::kLong)); }, "ValueError", target + "[3]"},
          {[&] { ce(x, at::zeros({}, at::kLong)); }, "ValueError", target + "[]"},
          {[&] { ce(x, t.to(at::kInt)); }, "TypeError", "expected class indices in int64 or uint8, but got Int"},
          {[&] { ce(x, t.to(at::kFloat)); }, "TypeError", "expected class indices in int64 or uint8, but got Float"},
          {[&] { ce(x, x.to(at::kLong)); }, "TypeError",
           "expected a target of input's shape to hold class probabilities in a floating dtype, but got Long"},
          {[&] { allfinite::cross_entropy(x, x, {}, 1); }, "ValueError",
           "expected no ignore_index beside class probabilities, but got 1"},
          {[&] { ce(x, t, at::ones({3})); }, "ValueError", "expected weight of shape [4], but got [3]"},
          {[&] { ce(x, t, w.to(at::kDouble)); }, "TypeError",
           "expected weight of input's dtype, Float," + kBeside + "Double"},
          {[&] { ce(x, t, w.to_sparse()); }, "NotImplementedError", "expected weight" + kSparse},
          {[&] { ce(x, t, w.to(at::kMeta)); }, "Error", "expected weight on the device of input, cpu, but got meta"},
          {[&] { ce(x, t.to(at::kMeta)); }, "Error", "expected target on the device of input, cpu, but got meta"},
          {[&] { ce(x, t, {}, "max"); }, "ValueError", "expected reduction to be none, mean or sum, but got max"},
          {[&] { ce(x, t, {}, "sum", 1.5); }, "ValueError", "expected label_smoothing in [0, 1], but got 1.5"},
          {[&] { ce(x, t, {}, "sum", kNan); }, "ValueError", "expected label_smoothing in [0, 1], but got nan"},
          {[&] { ce(x, t, {}, "sum", 0, -1); }, "ValueError", "expected z_loss >= 0 and finite, but got -1"},
          {[&] { ce(x, at::full({2}, 4, at::kLong)); }, "IndexError", index + "4 at row 0"},
          {[&] { ce(x, at::full({2}, -1, at::kLong)); }, "IndexError", index + "-1 at row 0"},
      },
      {x, t, w});
}

TEST_CASE("bad calls: attention") {
  using allfinite::scaled_dot_product_attention;
  const Tensor q = at::zeros({2, 4, 5, 8}), k = at::zeros({2, 4, 7, 8});
  const auto masked = [&](const Tensor& mask, bool causal = false) {
    allfinite::scaled_dot_product_attention_lse(q, k, k, mask, 0, causal);
  };
  const auto with = [&](double dropout_p, double scale = 1, double softcap = 0, at::OptionalIntArrayRef window = {}) {
    scaled_dot_product_attention(q, k, k, {}, dropout_p, false, scale, false, softcap, window);
  };
  const std::string window = "expected window to be (left, right), each >= 0, or -1 for unbounded, but got ";
  check_refused(
      "allfinite::scaled_dot_product_attention",
      {
          {[&] { scaled_dot_product_attention(Tensor(), k, k); }, "TypeError",
           "expected query to be a tensor, but got none"},
          {[&] { scaled_dot_product_attention(q.to(at::kLong), k, k); }, "TypeError",
           "expected query to be " + kFloats + "Long"},
          {[&] { scaled_dot_product_attention(q, k.to(at::kHalf), k); }, "TypeError",
           "expected key of query's dtype, Float, but got Half"},
          {[&] { scaled_dot_product_attention(q, k, k.to(at::kDouble)); }, "TypeError",
           "expected value of query's dtype, Float, but got Double"},
          {[&] { scaled_dot_product_attention(q, k.to_sparse(), k); }, "NotImplementedError", "expected key" + kSparse},
          {[&] { scaled_dot_product_attention(q, k.to(at::kMeta), k); }, "Error",
           "expected key on the device of query, cpu, but got meta"},
          {[&] { scaled_dot_product_attention(at::zeros({8}), k, k); }, "ValueError",
           "expected query of shape (..., length, size), but got [8]"},
          {[&] { scaled_dot_product_attention(q, k.slice(3, 0, 6), k); }, "ValueError",
           "expected query and key of one size in the last dimension, but got [2, 4, 5, 8] and [2, 4, 7, 6]"},
          {[&] { scaled_dot_product_attention(q, k, k.slice(2, 0, 3)); }, "ValueError",
           "expected key and value of one length, but got [2, 4, 7, 8] and [2, 4, 3, 8]"},
          {[&] { masked(at::ones({5, 7}, at::kByte)); }, "TypeError",
           "expected attn_mask to be bool (True: takes part) or floating (added), but got Byte"},
          {[&] { masked(at::zeros({5, 6})); }, "ValueError",
           "expected attn_mask to broadcast to [2, 4, 5, 7], but got [5, 6]"},
          {[&] { masked(at::zeros({5, 7}).to(at::kMeta)); }, "Error",
           "expected attn_mask on the device of query, cpu, but got meta"},
          {[&] { masked(at::zeros({5, 7}), true); }, "Error", "expected attn_mask or is_causal, but got both"},
          {[&] { with(-0.5); }, "ValueError", "expected dropout_p in [0, 1], but got -0.5"},
          {[&] { with(kNan); }, "ValueError", "expected dropout_p in [0, 1], but got nan"},
          {[&] { with(0, kInf); }, "ValueError", "expected a finite scale, but got inf"},
          {[&] { with(0, 1, -1); }, "ValueError", "expected softcap >= 0 and finite, but got -1"},
          {[&] { with(0, 1, kNan); }, "ValueError", "expected softcap >= 0 and finite, but got nan"},
          {[&] { with(0, 1, 0, at::IntArrayRef{1}); }, "ValueError", window + "[1]"},
          {[&] { with(0, 1, 0, at::IntArrayRef{-2, 0}); }, "ValueError", window + "[-2, 0]"},
      },
      {q, k});
}
