// unscale_and_check_ from C++: the function of ops.h. Bad input: test_bad_calls_in_place.cpp. Numerics: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "allfinite/ops.h"
#include "catch.h"

TEST_CASE("unscale_and_check_ unscales mixed dtypes and reports overflow of the unscaled value") {
  const at::Tensor half = at::full({3}, 60000.0, at::kHalf), wide = at::full({2, 2}, 8.0, at::kDouble).t();
  const at::Tensor found_inf = at::zeros({}, at::kFloat);
  allfinite::unscale_and_check_({half, wide}, found_inf, at::full({}, 0.25, at::kFloat));
  CHECK(half[2].item<double>() == 15000);
  CHECK(wide[1][1].item<double>() == 2);
  CHECK(found_inf.item<float>() == 0);
  allfinite::unscale_and_check_({half, wide}, found_inf, at::full({}, 8.0, at::kFloat));
  CHECK(found_inf.item<float>() == 1);
  CHECK(wide[0][0].item<double>() == 16);
}

TEST_CASE("unscale_and_check_ takes an empty list and never clears the flag") {
  const at::Tensor found_inf = at::ones({1}, at::kFloat);
  allfinite::unscale_and_check_({}, found_inf, at::ones({}, at::kFloat));
  CHECK(found_inf.item<float>() == 1);
}
