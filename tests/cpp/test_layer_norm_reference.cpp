// The expressions that fp64 on CUDA runs, on CPU tensors: against torch's own layer_norm and its gradients, and the
// rules of edge rows.
#include <ATen/ATen.h>

#include <vector>

#include "catch.h"
#include "ops/layer_norm_reference.h"

namespace {

using at::Tensor;

at::TensorOptions fp64() {
  return at::TensorOptions().dtype(at::kDouble);
}

bool close(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() &&
         at::allclose(a, b, /*rtol=*/1e-12, /*atol=*/1e-12);  // both are fp64, in another order
}

TEST_CASE("layer_norm's reference agrees with torch in fp64, output and all gradients") {
  at::manual_seed(1);
  for (const int64_t ndim : {1, 2}) {
    const Tensor x = at::randn({3, 4, 5}, fp64()) * 3 + 7, dy = at::randn({3, 4, 5}, fp64());
    const auto shape = x.sizes().slice(3 - ndim);
    const Tensor weight = at::randn(shape, fp64()), bias = at::randn(shape, fp64());
    const auto [y, stats] = allfinite::reference::layer_norm_forward(x, weight, bias, ndim, 1e-5);
    const auto [want, mean, rstd] = at::native_layer_norm(x, shape, weight, bias, 1e-5);
    CHECK(close(y, want));
    CHECK(stats.sizes() == (ndim == 1 ? at::IntArrayRef({3, 4, 4}) : at::IntArrayRef({3, 4})));
    const auto [dx, dweight, dbias] =
        allfinite::reference::layer_norm_backward(dy, x, weight, bias, stats, ndim, {true, true, true});
    const auto [want_dx, want_dweight, want_dbias] =
        at::native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, {true, true, true});
    CHECK(close(dx, want_dx));
    CHECK(close(dweight, want_dweight));
    CHECK(close(dbias, want_dbias));
  }
}

TEST_CASE("layer_norm's reference, F7: a constant row with eps 0 gives the bias and dx 0") {
  const Tensor x = at::full({2, 5}, 0.1, fp64()), bias = at::arange(5, fp64()), dy = at::randn({2, 5}, fp64());
  const auto [y, stats] = allfinite::reference::layer_norm_forward(x, std::nullopt, bias, 1, 0);
  CHECK(at::equal(y, bias.expand({2, 5})));
  const auto [dx, dweight, dbias] =
      allfinite::reference::layer_norm_backward(dy, x, std::nullopt, bias, stats, 1, {true, false, true});
  CHECK(at::equal(dx.abs(), at::zeros({2, 5}, fp64())));
  CHECK_FALSE(dweight.defined());
  CHECK(close(dbias, dy.sum(0)));
}

TEST_CASE("layer_norm's reference takes empty inputs") {
  const Tensor x = at::empty({0, 5}, fp64());
  const auto [y, stats] = allfinite::reference::layer_norm_forward(x, std::nullopt, std::nullopt, 1, 1e-5);
  CHECK(y.sizes() == at::IntArrayRef({0, 5}));
  CHECK(stats.sizes() == at::IntArrayRef({0, 4}));
}

}  // namespace
