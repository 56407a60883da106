// allfinite::scaled_dot_product_attention from C++: values, gradients and the messages of bad input, which are those of
// Python.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "allfinite/ops.h"
#include "catch.h"
#include "error_text.h"

namespace {

const std::string kOp = "allfinite::scaled_dot_product_attention: ";

at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias) {
  const auto wide = q.to(at::kDouble);
  const auto scores = at::matmul(wide, k.to(at::kDouble).transpose(-1, -2)) / std::sqrt(double(q.size(-1))) + bias;
  return at::matmul(scores.softmax(-1), v.to(at::kDouble));
}

}  // namespace

TEST_CASE("attention: output of every dtype, with a bias and from C++ defaults") {
  at::manual_seed(0);
  for (auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const auto q = at::randn({2, 3, 20, 8}).to(dtype), k = at::randn({2, 3, 150, 8}).to(dtype);
    const auto v = at::randn({2, 3, 150, 5}).to(dtype), bias = at::randn({20, 150}, at::kDouble);
    // One rounding of values below 2, and of fp32 sums.
    const double bound = dtype == at::kHalf ? 0x1p-11 : dtype == at::kBFloat16 ? 0x1p-8 : 0x1p-21;
    const auto plain = allfinite::scaled_dot_product_attention(q, k, v);
    CHECK(plain.scalar_type() == dtype);
    CHECK((plain - reference(q, k, v, at::zeros({1}, at::kDouble))).abs().max().item<double>() <= bound);
    const auto biased = allfinite::scaled_dot_product_attention(q, k, v, bias.to(at::kFloat));
    CHECK((biased - reference(q, k, v, bias.to(at::kFloat))).abs().max().item<double>() <= bound);
  }
}

TEST_CASE("attention: lse and gradients in C++") {
  at::manual_seed(0);
  const auto leaf = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble).requires_grad_(); };
  const auto q = leaf({4, 5, 6}), k = leaf({2, 7, 6}), v = leaf({2, 7, 3});
  const auto [output, lse] = allfinite::scaled_dot_product_attention_lse(q, k, v, {}, 0.0, false, 0.3, true);
  const auto all_k = k.repeat_interleave(2, 0), all_v = v.repeat_interleave(2, 0);
  const auto scores = at::matmul(q, all_k.transpose(-1, -2)) * 0.3;
  const auto expected = at::matmul(scores.softmax(-1), all_v), expected_lse = scores.logsumexp(-1);
  CHECK(at::allclose(output, expected));
  CHECK(at::allclose(lse, expected_lse));
  const auto dy = at::randn_like(output), dlse = at::randn_like(lse);
  const auto ours = torch::autograd::grad({output, lse}, {q, k, v}, {dy, dlse});
  const auto theirs = torch::autograd::grad({expected, expected_lse}, {q, k, v}, {dy, dlse});
  for (size_t i = 0; i < ours.size(); ++i) {
    CHECK(at::allclose(ours[i], theirs[i]));
  }
}

TEST_CASE("attention: mask, window and causal say the same") {
  at::manual_seed(0);
  const auto q = at::randn({1, 2, 9, 4}), k = at::randn({1, 2, 9, 4}), v = at::randn({1, 2, 9, 4});
  const auto lower = at::ones({9, 9}, at::kBool).tril();
  const auto causal = allfinite::scaled_dot_product_attention(q, k, v, {}, 0.0, true);
  CHECK(at::equal(causal, allfinite::scaled_dot_product_attention(q, k, v, lower)));
  const std::vector<int64_t> window{-1, 0};
  CHECK(at::equal(causal, allfinite::scaled_dot_product_attention(q, k, v, {}, 0.0, false, {}, false, 0.0, window)));
  // An undefined tensor is no mask, as everywhere in C++.
  CHECK(at::equal(causal, allfinite::scaled_dot_product_attention(q, k, v, at::Tensor(), 0.0, true)));
}

TEST_CASE("F1: attention under a loss scale that overflows an fp16 dS; F7: an empty row") {
  const auto q = at::zeros({1, 1, 1, 64}, at::kHalf).requires_grad_();
  const auto signs = at::tensor({1.0, -1.0}).view({1, 1, 2, 1}).expand({1, 1, 2, 64});
  const auto k = (signs * 0.01).to(at::kHalf), v = (signs * 10).to(at::kHalf);
  const auto output = allfinite::scaled_dot_product_attention(q, k, v);
  const auto dq = torch::autograd::grad({output}, {q}, {at::full_like(output, 1000)})[0];
  CHECK(std::abs(dq.to(at::kFloat).mean().item<float>() - 800) < 1);  // 0.01 in fp16 is off by 2e-4
  const auto [empty, lse] = allfinite::scaled_dot_product_attention_lse(q, k, v, at::zeros({1, 2}, at::kBool));
  CHECK(at::equal(empty, at::zeros_like(empty)));
  CHECK(lse.item<float>() == -std::numeric_limits<float>::infinity());
}

TEST_CASE("attention: bad input is refused with type and message") {
  const auto q = at::zeros({2, 4, 5, 8}), k = at::zeros({2, 4, 7, 8});
  const auto text = [&](const at::Tensor& query, const at::Tensor& key, const std::optional<at::Tensor>& mask = {},
                        double p = 0, bool causal = false, std::optional<double> scale = {}, double softcap = 0,
                        std::vector<int64_t> window = {-1, -1}) {
    return error_text<c10::Error>([&] {
      allfinite::scaled_dot_product_attention(query, key, k, mask, p, causal, scale, false, softcap, window);
    });
  };
  CHECK(text(q.to(at::kLong), k) == kOp + "expected query to be float16, bfloat16, float32 or float64, but got Long");
  CHECK(text(q, at::Tensor()) == kOp + "expected key to be a tensor, but got none");
  CHECK(text(q, k.to(at::kHalf)) == kOp + "expected key of query's dtype, Float, but got Half");
  CHECK(text(q, k.narrow(2, 0, 3)) ==
        kOp + "expected key and value of one length, but got [2, 4, 3, 8] and [2, 4, 7, 8]");
  CHECK(text(q, k, at::zeros({5, 6})) == kOp + "expected attn_mask to broadcast to [2, 4, 5, 7], but got [5, 6]");
  CHECK(text(q, k, at::zeros({5, 7}), 0, true) == kOp + "expected attn_mask or is_causal, but got both");
  CHECK(text(q, k, {}, 1.5) == kOp + "expected dropout_p in [0, 1], but got 1.5");
  CHECK(text(q, k, {}, 0, false, INFINITY) == kOp + "expected a finite scale, but got inf");
  CHECK(text(q, k, {}, 0, false, {}, -1) == kOp + "expected softcap >= 0 and finite, but got -1");
  CHECK(text(q, k, {}, 0, false, {}, 0, {1}) ==
        kOp + "expected window to be (left, right), each >= 0, or -1 for unbounded, but got [1]");
  CHECK_THROWS_AS(allfinite::scaled_dot_product_attention(q, k.to(at::kHalf), k), c10::TypeError);
  CHECK_THROWS_AS(allfinite::scaled_dot_product_attention(q, k, k, {}, -1.0), c10::ValueError);
  CHECK_THROWS_AS(allfinite::scaled_dot_product_attention(q.to_sparse(), k, k), c10::NotImplementedError);
}
