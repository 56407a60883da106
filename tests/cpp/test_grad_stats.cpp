// grad_stats from C++: the function of ops.h, its error types and texts. Numerics: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "allfinite/ops.h"
#include "catch.h"
#include "error_text.h"

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

TEST_CASE("grad_stats refuses by argument") {
  const at::Tensor grad = at::ones({2}), integer = at::ones({2}, at::kInt);
  CHECK(error_text<c10::TypeError>([&] { allfinite::grad_stats({grad, integer}); }) ==
        "allfinite::grad_stats: expected grads[1] to be floating-point or complex, but got Int");
  CHECK(
      error_text<c10::NotImplementedError>([&] { allfinite::grad_stats({at::ones({2, 2}).to_sparse()}); }) ==
      "allfinite::grad_stats: expected grads[0] to be a dense (strided) tensor, but got layout Sparse; pass the values "
      "of its coalesced form");
}
