// What the ops that write in place, and the loss scale's policy, refuse from C++: by class and text, before any write.
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "allfinite/amp/scale_policy.h"
#include "allfinite/ops/gradients.h"
#include "bad_calls.h"
#include "catch.h"

namespace {

using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
const std::string kFloats = " to be floating-point or complex, but got ";
const std::string kSparse =
    " to be a dense (strided) tensor, but got layout Sparse; pass the values of its coalesced form";

}  // namespace

TEST_CASE("bad calls: unscale_and_check_ and grad_stats") {
  const Tensor grad = at::full({3}, kInf), found = at::zeros({}), inverse = at::full({}, 0.5);
  const auto unscale = [&](const Tensor& last, const Tensor& found_inf, const Tensor& inv_scale) {
    allfinite::unscale_and_check_({grad, last}, found_inf, inv_scale);
  };
  check_refused(
      "allfinite::unscale_and_check_",
      {
          {[&] { unscale(Tensor(), found, inverse); }, "TypeError", "expected grads[1] to be a tensor, but got none"},
          {[&] { unscale(grad.to(at::kBool), found, inverse); }, "TypeError", "expected grads[1]" + kFloats + "Bool"},
          {[&] { unscale(grad.to(at::kMeta), found, inverse); }, "Error",
           "expected grads[1] on the device of found_inf, cpu, but got meta"},
          {[&] { unscale(at::eye(2).to_sparse(), found, inverse); }, "NotImplementedError",
           "expected grads[1]" + kSparse},
          {[&] { unscale(grad, Tensor(), inverse); }, "TypeError", "expected found_inf to be a tensor, but got none"},
          {[&] { unscale(grad, found.to(at::kDouble), inverse); }, "TypeError",
           "expected found_inf to be Float, but got Double"},
          {[&] { unscale(grad, at::zeros({2}), inverse); }, "ValueError",
           "expected found_inf of one element, but got shape [2]"},
          {[&] { unscale(grad, at::zeros({0}), inverse); }, "ValueError",
           "expected found_inf of one element, but got shape [0]"},
          {[&] { unscale(grad, found, inverse.to(at::kHalf)); }, "TypeError",
           "expected inv_scale to be Float, but got Half"},
          {[&] { unscale(grad, found, at::ones({3})); }, "ValueError",
           "expected inv_scale of one element, but got shape [3]"},
          {[&] { unscale(grad, found, inverse.to(at::kMeta)); }, "Error",
           "expected inv_scale on the device of found_inf, cpu, but got meta"},
      },
      {grad, found, inverse});
  check_refused("allfinite::grad_stats",
                {
                    {[&] { allfinite::grad_stats({grad, grad.to(at::kInt)}); }, "TypeError",
                     "expected grads[1]" + kFloats + "Int"},
                    {[&] { allfinite::grad_stats({grad, grad.to(at::kMeta)}); }, "Error",
                     "expected grads[1] on the device of grads[0], cpu, but got meta"},
                    {[&] { allfinite::grad_stats({grad, at::eye(2).to_sparse()}); }, "NotImplementedError",
                     "expected grads[1]" + kSparse},
                },
                {grad});
}

TEST_CASE("bad calls: update_scale_") {
  const Tensor scale = at::full({}, 8.0), tracker = at::full({}, 3, at::kInt), found = at::ones({});
  const auto tensors = [](const Tensor& s, const Tensor& t, const Tensor& f) {
    allfinite::update_scale_(s, t, f, 2, 0.5, 2000, 1, 0x1p24);
  };
  const auto rule = [&](double growth, double backoff, int64_t interval, double floor, double cap) {
    allfinite::update_scale_(scale, tracker, found, growth, backoff, interval, floor, cap);
  };
  const std::string growth = "expected growth_factor >= 1 and finite, but got ";
  const std::string backoff = "expected 0 < backoff_factor <= 1, but got ",
                    bounds = " between 2^-126 and 2^126, but got ";
  check_refused(
      "allfinite::update_scale_",
      {
          {[&] { tensors(Tensor(), tracker, found); }, "TypeError", "expected scale to be a tensor, but got none"},
          {[&] { tensors(scale.to(at::kDouble), tracker, found); }, "TypeError",
           "expected scale to be Float, but got Double"},
          {[&] { tensors(at::ones({1}).to_sparse(), tracker, found); }, "NotImplementedError",
           "expected scale to be a dense (strided) tensor, but got layout Sparse"},
          {[&] { tensors(scale, tracker.to(at::kLong), found); }, "TypeError",
           "expected growth_tracker to be Int, but got Long"},
          {[&] { tensors(scale, tracker, at::zeros({2})); }, "ValueError",
           "expected found_inf of one element, but got shape [2]"},
          {[&] { tensors(scale, tracker, found.to(at::kMeta)); }, "Error",
           "expected found_inf on the device of scale, cpu, but got meta"},
          {[&] { rule(0.5, 0.5, 1, 1, 2); }, "ValueError", growth + "0.5"},
          {[&] { rule(kNan, 0.5, 1, 1, 2); }, "ValueError", growth + "nan"},
          {[&] { rule(kInf, 0.5, 1, 1, 2); }, "ValueError", growth + "inf"},
          {[&] { rule(2, 0, 1, 1, 2); }, "ValueError", backoff + "0"},
          {[&] { rule(2, 1.5, 1, 1, 2); }, "ValueError", backoff + "1.5"},
          {[&] { rule(2, kNan, 1, 1, 2); }, "ValueError", backoff + "nan"},
          {[&] { rule(2, 0.5, 0, 1, 2); }, "ValueError", "expected growth_interval >= 1, but got 0"},
          {[&] { rule(2, 0.5, 1, 0, 2); }, "ValueError", "expected min_scale" + bounds + "0"},
          {[&] { rule(2, 0.5, 1, 1, kInf); }, "ValueError", "expected max_scale" + bounds + "inf"},
          {[&] { rule(2, 0.5, 1, 2, 1); }, "ValueError", "expected min_scale <= max_scale, but got 2 and 1"},
      },
      {scale, tracker, found});
}

TEST_CASE("bad calls: clipping") {
  const Tensor grad = at::full({3}, 7.0), parameter = at::zeros({3}).set_requires_grad(true), five = at::full({}, 5.0);
  parameter.mutable_grad() = grad;
  const auto clip = [&](const Tensor& last, double max_norm) {
    allfinite::clip_grad_norm_({parameter, last}, max_norm);
  };
  check_refused(
      "allfinite::clip_grad_norm_",
      {
          {[&] { clip(parameter, -1); }, "ValueError", "expected max_norm >= 0, but got -1"},
          {[&] { clip(parameter, kNan); }, "ValueError", "expected max_norm >= 0, but got nan"},
          {[&] { clip(Tensor(), 1); }, "TypeError", "expected each of parameters to be a tensor, but got none"},
      },
      {grad, parameter});
  check_refused("allfinite::get_total_norm",
                {
                    {[&] { allfinite::get_total_norm({grad}, 0); }, "ValueError", "expected norm_type > 0, but got 0"},
                    {[&] { allfinite::clip_grad_norm_({parameter}, 1, kNan); }, "ValueError",
                     "expected norm_type > 0, but got nan"},
                    {[&] { allfinite::get_total_norm({grad, grad.to(at::kLong)}); }, "TypeError",
                     "expected tensors[1]" + kFloats + "Long"},
                    {[&] { allfinite::get_total_norm({grad, at::eye(2).to_sparse()}); }, "NotImplementedError",
                     "expected tensors[1]" + kSparse},
                },
                {grad, parameter});
  const auto scale_down = [&](const Tensor& last, double max_norm, const Tensor& norm) {
    allfinite::clip_grads_with_norm_({grad, last}, max_norm, norm);
  };
  check_refused(
      "allfinite::clip_grads_with_norm_",
      {
          {[&] { scale_down(grad, -1, five); }, "ValueError", "expected max_norm >= 0, but got -1"},
          {[&] { scale_down(grad, 1, at::ones({2})); }, "ValueError",
           "expected total_norm of one element, but got shape [2]"},
          {[&] { scale_down(grad.to(at::kLong), 1, five); }, "TypeError", "expected grads[1]" + kFloats + "Long"},
          {[&] { scale_down(grad.to(at::kMeta), 1, five); }, "Error",
           "expected grads[1] on the device of total_norm, cpu, but got meta"},
      },
      {grad, five});
}

TEST_CASE("bad calls: the loss scale's policy") {
  using allfinite::amp::ScalePolicy;
  ScalePolicy policy;
  const std::string growth = "expected growth_factor to be finite and > 1, but got ";
  const std::string bounds = " in [2^-126, 2^126], but got ",
                    scale = "expected s to be finite and > 0 as float32, but got ";
  check_refused(
      "allfinite::ScalePolicy",
      {
          {[&] { policy.set_growth_factor(1); }, "ValueError", growth + "1"},
          {[&] { policy.set_growth_factor(kInf); }, "ValueError", growth + "inf"},
          {[&] { policy.set_backoff_factor(1); }, "ValueError", "expected backoff_factor in (0, 1), but got 1"},
          {[&] { policy.set_backoff_factor(kNan); }, "ValueError", "expected backoff_factor in (0, 1), but got nan"},
          {[&] { policy.set_growth_interval(0); }, "ValueError", "expected growth_interval >= 1, but got 0"},
          {[&] { policy.set_min_scale(0); }, "ValueError", "expected min_scale" + bounds + "0"},
          {[&] { policy.set_max_scale(kInf); }, "ValueError", "expected max_scale" + bounds + "inf"},
          {[&] { policy.set_max_scale(0.5); }, "ValueError",
           "expected min_scale <= max_scale, but got min_scale 1 and max_scale 0.5"},
          {[&] { ScalePolicy(2, 0.5, 2000, 4, 2); }, "ValueError",
           "expected min_scale <= max_scale, but got min_scale 4 and max_scale 2"},
          {[&] { ScalePolicy::check_scale("s", 1e39); }, "ValueError", scale + "1e+39"},
          {[&] { ScalePolicy::check_scale("s", -1); }, "ValueError", scale + "-1"},
          {[&] { ScalePolicy::check_tracker(-1); }, "ValueError",
           "expected growth_tracker in [0, 2^31 - 1), but got -1"},
      });
  CHECK(policy == ScalePolicy());
}
