// Launches that the launchers make on inputs too large for a test only: more rows than blocks.
#include "catch.h"
#include "cuda/layer_norm_backward.cuh"
#include "layer_norm_case.h"

namespace allfinite::simt {
namespace {

TEST_CASE("layer_norm: a grid smaller than the number of rows does them all") {
  auto c = random_case<float, float>(7, 33, 18);
  c.weight.clear();
  c.bias.clear();
  GuardedBuffer<float> x(rounded<float>(c.x), 0), dy(rounded<float>(c.dy), 0);
  GuardedBuffer<float> y(c.x.size()), stats(28), dx(c.x.size());
  const dim3 blocks(3), threads(64);

  cuda::LayerNormForwardParams forward{};
  forward.x = x.data();
  forward.y = y.data();
  forward.stats = stats.data();
  forward.rows = c.rows;
  forward.n = c.n;
  forward.eps = c.eps;
  run_grid(blocks, threads, [&] { cuda::layer_norm_forward_kernel<false, float, float>(forward); });
  CHECK(forward_ratio<float>(to_doubles(y.values()), exact_forward(c)) < 1);

  cuda::LayerNormBackwardParams backward{};
  backward.dy = dy.data();
  backward.x = x.data();
  backward.stats = stats.data();
  backward.dx = dx.data();
  backward.rows = c.rows;
  backward.n = c.n;
  run_grid(blocks, threads, [&] { cuda::layer_norm_input_gradient_kernel<false, float, float>(backward); });
  CHECK(gradient_ratio<float>(to_doubles(dx.values()), exact_backward(c).dx) < 1);
}

}  // namespace
}  // namespace allfinite::simt
