// grad_stats from C++: the function of ops.h. Bad input: test_bad_calls_in_place.cpp. Numerics: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "allfinite/ops.h"
#include "catch.h"

TEST_CASE("grad_stats reads mixed dtypes at once") {
  const at::Tensor half = at::full({2, 8}, 3.0, at::kHalf), wide = at::full({7}, 0x1p-1030, at::kDouble);
  const allfinite::GradStats stats = allfinite::grad_stats({half, wide, at::zeros({5}, at::kFloat)});
  CHECK(stats.norm.item<double>() == 12);
  CHECK(stats.amax.item<double>() == 3);
  CHECK(stats.zeros.item<int64_t>() == 5);
  CHECK(stats.subnormals.item<int64_t>() == 7);
  CHECK(stats.found_inf.item<float>() == 0);
}

TEST_CASE("grad_stats shows what is not finite") {
  const allfinite::GradStats stats =
      allfinite::grad_stats({at::full({3}, -std::numeric_limits<double>::infinity(), at::kBFloat16)});
  CHECK(stats.found_inf.item<float>() == 1);
  CHECK(std::isinf(stats.norm.item<double>()));
  CHECK(std::isinf(stats.amax.item<double>()));
}

TEST_CASE("grad_stats of no tensor is zero") {
  CHECK(allfinite::grad_stats({}).norm.item<double>() == 0);
}
