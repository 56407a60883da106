// clip_grad_norm_ from C++. Bad input: test_bad_calls_in_place.cpp. Numerics: tests/python.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <vector>

#include "allfinite/ops/gradients.h"
#include "catch.h"
#include "error_text.h"

namespace {

at::Tensor with_grad(const at::Tensor& grad) {
  at::Tensor parameter = at::zeros_like(grad).set_requires_grad(true);
  parameter.mutable_grad() = grad;
  return parameter;
}

}  // namespace

TEST_CASE("clip_grad_norm_ clips mixed dtypes by their common norm") {
  const std::vector<at::Tensor> parameters{with_grad(at::full({9}, 1.0)), with_grad(at::full({4}, 2.0, at::kHalf)),
                                           at::ones({3})};
  CHECK(allfinite::clip_grad_norm_(parameters, 2.5).item<double>() == 5);
  CHECK(std::fabs(parameters[0].grad()[0].item<double>() - 0.5) < 1e-6);  // 1e-6 in torch's formula
  CHECK(parameters[1].grad()[0].item<double>() == 1);
}

TEST_CASE("clip_grad_norm_ leaves gradients whose norm is not finite") {
  const std::vector<at::Tensor> parameters{with_grad(at::full({2}, std::numeric_limits<float>::infinity())),
                                           with_grad(at::ones({2}))};
  CHECK(std::isinf(allfinite::clip_grad_norm_(parameters, 1).item<double>()));
  CHECK(parameters[1].grad()[0].item<double>() == 1);
  CHECK(error_text<c10::Error>([&] { allfinite::clip_grad_norm_(parameters, 1, 2, true); }) ==
        "allfinite::clip_grad_norm_: expected a finite norm of order 2, but got inf; nothing was clipped");
}

TEST_CASE("clip_grad_norm_ of nothing is zero") {
  CHECK(allfinite::clip_grad_norm_({}, 1).item<double>() == 0);
  CHECK(allfinite::clip_grad_norm_({at::ones({2})}, 1).item<double>() == 0);
}
