// unscale_and_check_ from C++: the function of ops.h, its error types and texts. Numerics: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <limits>

#include "allfinite/ops.h"
#include "catch.h"
#include "error_text.h"

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

TEST_CASE("unscale_and_check_ refuses by argument, and has then written nothing") {
  const at::Tensor grad = at::full({2}, std::numeric_limits<double>::infinity(), at::kFloat);
  const at::Tensor found_inf = at::zeros({}, at::kFloat), inv_scale = at::full({}, 0.5, at::kFloat);
  const at::Tensor integer = at::ones({2}, at::kInt), sparse = at::ones({2, 2}).to_sparse();
  CHECK(error_text<c10::TypeError>([&] { allfinite::unscale_and_check_({grad, integer}, found_inf, inv_scale); }) ==
        "allfinite::unscale_and_check_: expected grads[1] to be floating-point or complex, but got Int");
  CHECK(error_text<c10::NotImplementedError>(
            [&] { allfinite::unscale_and_check_({grad, sparse}, found_inf, inv_scale); }) ==
        "allfinite::unscale_and_check_: expected grads[1] to be a dense (strided) tensor, but got layout Sparse; pass "
        "the values of its coalesced form");
  CHECK(error_text<c10::ValueError>([&] {
          allfinite::unscale_and_check_({grad}, found_inf, at::ones({2}, at::kFloat));
        }) == "allfinite::unscale_and_check_: expected inv_scale of one element, but got shape [2]");
  CHECK(error_text<c10::TypeError>([&] {
          allfinite::unscale_and_check_({grad}, at::zeros({}, at::kDouble), inv_scale);
        }) == "allfinite::unscale_and_check_: expected found_inf to be Float, but got Double");
  CHECK(found_inf.item<float>() == 0);
}
