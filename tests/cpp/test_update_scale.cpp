// update_scale_ from C++: the function of ops.h, its error types and texts. Bounds and bits: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <limits>

#include "allfinite/ops.h"
#include "catch.h"
#include "error_text.h"

TEST_CASE("update_scale_ grows after the interval and backs off at once") {
  const at::Tensor scale = at::full({}, 4.0, at::kFloat), tracker = at::zeros({}, at::kInt);
  const at::Tensor good = at::zeros({}, at::kFloat), bad = at::ones({}, at::kFloat);
  const auto update = [&](const at::Tensor& found_inf) {
    allfinite::update_scale_(scale, tracker, found_inf, 2.0, 0.25, 2, 1.0, 0x1p24);
  };
  update(good);
  CHECK(tracker.item<int>() == 1);
  update(good);
  CHECK(scale.item<float>() == 8);
  update(bad);
  CHECK(scale.item<float>() == 2);
  CHECK(tracker.item<int>() == 0);
  update(bad);
  CHECK(scale.item<float>() == 1);  // the floor
}

TEST_CASE("update_scale_ refuses by argument, and has then written nothing") {
  const at::Tensor scale = at::full({}, 4.0, at::kFloat), tracker = at::zeros({}, at::kInt);
  const at::Tensor bad = at::ones({}, at::kFloat);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refused = [&](double growth, int64_t interval, double min_scale) {
    return error_text<c10::ValueError>(
        [&] { allfinite::update_scale_(scale, tracker, bad, growth, 0.5, interval, min_scale, 2.0); });
  };
  CHECK(refused(nan, 1, 1) == "allfinite::update_scale_: expected growth_factor >= 1 and finite, but got nan");
  CHECK(refused(2, 0, 1) == "allfinite::update_scale_: expected growth_interval >= 1, but got 0");
  CHECK(refused(2, 1, 4) == "allfinite::update_scale_: expected min_scale <= max_scale, but got 4 and 2");
  CHECK(refused(2, 1, 0) == "allfinite::update_scale_: expected min_scale between 2^-126 and 2^126, but got 0");
  CHECK(error_text<c10::TypeError>([&] {
          allfinite::update_scale_(scale, tracker.to(at::kLong), bad, 2.0, 0.5, 1, 1.0, 2.0);
        }) == "allfinite::update_scale_: expected growth_tracker to be Int, but got Long");
  CHECK(scale.item<float>() == 4);
}
