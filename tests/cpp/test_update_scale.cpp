// update_scale_ from C++: the function of ops.h. Bad input: test_bad_calls_in_place.cpp. Bounds and bits: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "allfinite/ops.h"
#include "catch.h"

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
