// One LayerNorm call: inputs, the kernels run on them through their launchers, and the exact results in
// double.
#pragma once
#include <string>
#include <vector>

#include "cuda/layer_norm.h"
#include "guarded_buffer.h"
#include "layer/runtime.h"
#include "numbers.h"

namespace allfinite::simt {

// X: activations, W: parameters. Values are representable in their types.
template <class X, class W>
struct LayerNormCase {
  int64_t rows = 0, n = 0;
  double eps = 1e-5;
  std::vector<double> x, dy, weight, bias;  // weight, bias: empty means absent
  size_t offset = 0;                        // of every pointer, in elements past a 64-byte boundary

  double& x_at(int64_t row, int64_t column) { return x[static_cast<size_t>(row * n + column)]; }
  double& dy_at(int64_t row, int64_t column) { return dy[static_cast<size_t>(row * n + column)]; }
};

template <class T>
std::vector<double> random_values(int64_t count, Random& random, double scale, double shift) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(to_double(rounded<T>(random.normal() * scale + shift)));
  }
  return values;
}

template <class X, class W>
LayerNormCase<X, W> random_case(int64_t rows, int64_t n, uint32_t seed, double scale = 2, double shift = 0.5) {
  Random random(seed);
  LayerNormCase<X, W> c;
  c.rows = rows;
  c.n = n;
  c.x = random_values<X>(rows * n, random, scale, shift);
  c.dy = random_values<X>(rows * n, random, 1, 0.1);
  c.weight = random_values<W>(n, random, 0.5, 1);
  c.bias = random_values<W>(n, random, 1, 0);
  return c;
}

struct ForwardResult {
  std::vector<double> y;
  std::vector<float> stats;
  bool guards_intact = false;
};

template <class X, class W>
ForwardResult run_forward(const LayerNormCase<X, W>& c) {
  const auto size = static_cast<size_t>(c.rows * c.n);
  GuardedBuffer<X> x(rounded<X>(c.x), c.offset), y(size, c.offset);
  GuardedBuffer<W> weight(rounded<W>(c.weight), c.offset), bias(rounded<W>(c.bias), c.offset);
  GuardedBuffer<float> stats(static_cast<size_t>(c.rows * cuda::kLayerNormStats));
  cuda::LayerNormForwardParams p{};
  p.x = x.data();
  p.weight = c.weight.empty() ? nullptr : weight.data();
  p.bias = c.bias.empty() ? nullptr : bias.data();
  p.y = y.data();
  p.stats = stats.data();
  p.rows = c.rows;
  p.n = c.n;
  p.eps = c.eps;
  p.dtype = Format<X>::kDType;
  p.weight_dtype = Format<W>::kDType;
  if (cuda::layer_norm_forward(p, nullptr) != cudaSuccess) {
    throw Error("layer_norm_forward was refused");
  }
  return {to_doubles(y.values()), stats.values(), y.guards_intact() && stats.guards_intact()};
}

struct BackwardResult {
  std::vector<double> dx, dweight, dbias;
  bool guards_intact = false;
};

struct Wanted {
  bool dx = true, dweight = true, dbias = true;
};

// The statistics come from the forward kernel. Outputs that are not wanted stay NaN.
template <class X, class W>
BackwardResult run_backward(const LayerNormCase<X, W>& c, Wanted wanted = {}) {
  const auto size = static_cast<size_t>(c.rows * c.n);
  GuardedBuffer<X> x(rounded<X>(c.x), c.offset), dy(rounded<X>(c.dy), c.offset), dx(size, c.offset);
  GuardedBuffer<W> weight(rounded<W>(c.weight), c.offset);
  GuardedBuffer<W> dweight(static_cast<size_t>(c.n), c.offset), dbias(static_cast<size_t>(c.n), c.offset);
  GuardedBuffer<float> stats(run_forward(c).stats, 0);
  GuardedBuffer<double> workspace(static_cast<size_t>(cuda::layer_norm_backward_workspace(c.rows, c.n)));
  cuda::LayerNormBackwardParams p{};
  p.dy = dy.data();
  p.x = x.data();
  p.weight = c.weight.empty() ? nullptr : weight.data();
  p.stats = stats.data();
  p.dx = wanted.dx ? dx.data() : nullptr;
  p.dweight = wanted.dweight ? dweight.data() : nullptr;
  p.dbias = wanted.dbias ? dbias.data() : nullptr;
  p.workspace = workspace.data();
  p.rows = c.rows;
  p.n = c.n;
  p.dtype = Format<X>::kDType;
  p.weight_dtype = p.dweight_dtype = p.dbias_dtype = Format<W>::kDType;
  if (cuda::layer_norm_backward(p, nullptr) != cudaSuccess) {
    throw Error("layer_norm_backward was refused");
  }
  const bool intact =
      dx.guards_intact() && dweight.guards_intact() && dbias.guards_intact() && workspace.guards_intact();
  return {to_doubles(dx.values()), to_doubles(dweight.values()), to_doubles(dbias.values()), intact};
}

struct ExactRow {
  std::vector<double> xhat;
  double rstd;
};

template <class X, class W>
ExactRow exact_row(const LayerNormCase<X, W>& c, int64_t row) {
  const double* x = c.x.data() + row * c.n;
  const auto n = static_cast<double>(c.n);
  long double sum = 0, squares = 0;
  for (int64_t i = 0; i < c.n; ++i) {
    sum += x[i];
  }
  const long double mean = sum / n;
  for (int64_t i = 0; i < c.n; ++i) {
    squares += (x[i] - mean) * (x[i] - mean);
  }
  const auto denominator = static_cast<double>(squares / n + c.eps);
  ExactRow result{{}, denominator == 0 ? 0 : 1 / std::sqrt(denominator)};
  for (int64_t i = 0; i < c.n; ++i) {
    result.xhat.push_back(static_cast<double>((x[i] - mean) * result.rstd));
  }
  return result;
}

template <class X, class W>
Exact exact_forward(const LayerNormCase<X, W>& c) {
  Exact result;
  for (int64_t row = 0; row < c.rows; ++row) {
    const ExactRow r = exact_row(c, row);
    for (size_t i = 0; i < r.xhat.size(); ++i) {
      const double scaled = r.xhat[i] * (c.weight.empty() ? 1 : c.weight[i]), bias = c.bias.empty() ? 0 : c.bias[i];
      result.values.push_back(scaled + bias);
      result.terms.push_back(std::fabs(scaled) + std::fabs(bias));
    }
  }
  return result;
}

struct ExactBackward {
  Exact dx, dweight, dbias;
};

inline void add_term(Exact& sum, size_t i, double term) {
  sum.values[i] += term;
  sum.terms[i] += std::fabs(term);
}

template <class X, class W>
ExactBackward exact_backward(const LayerNormCase<X, W>& c) {
  const auto n = static_cast<size_t>(c.n);
  const Exact zeros{std::vector<double>(n), std::vector<double>(n)};
  ExactBackward result{{}, zeros, zeros};
  for (int64_t row = 0; row < c.rows; ++row) {
    const ExactRow r = exact_row(c, row);
    const double* dy = c.dy.data() + row * c.n;
    std::vector<double> g(n);
    double sum_g = 0, sum_gx = 0, abs_g = 0, abs_gx = 0;
    for (size_t i = 0; i < n; ++i) {
      g[i] = dy[i] * (c.weight.empty() ? 1 : c.weight[i]);
      sum_g += g[i] / static_cast<double>(n);
      sum_gx += g[i] * r.xhat[i] / static_cast<double>(n);
      abs_g += std::fabs(g[i]) / static_cast<double>(n);
      abs_gx += std::fabs(g[i] * r.xhat[i]) / static_cast<double>(n);
      add_term(result.dweight, i, dy[i] * r.xhat[i]);
      add_term(result.dbias, i, dy[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      result.dx.values.push_back(r.rstd * (g[i] - sum_g - r.xhat[i] * sum_gx));
      result.dx.terms.push_back(r.rstd * (std::fabs(g[i]) + abs_g + std::fabs(r.xhat[i]) * abs_gx));
    }
  }
  return result;
}

// F3 for y and dx: below 1 is right.
template <class X>
double forward_ratio(const std::vector<double>& got, const Exact& exact) {
  return std::is_same_v<X, float> ? l2_ratio(got, exact, 2e-7, 0) : worst_ratio<X>(got, exact, 1, 0x1p-20);
}
template <class X>
double gradient_ratio(const std::vector<double>& got, const Exact& exact) {
  return std::is_same_v<X, float> ? l2_ratio(got, exact, 2e-7, 2e-7) : worst_ratio<X>(got, exact, 1, 0x1p-20);
}
// F3 for dweight and dbias.
template <class W>
double column_ratio(const std::vector<double>& got, const Exact& exact) {
  return worst_ratio<W>(got, exact, 1, 0x1p-21);
}

// Runs `body` with the threads of the kernels going in each order.
template <class Body>
void in_every_order(Body body) {
  for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    config().order = order;
    body();
  }
  config().order = Order::kForward;
}

}  // namespace allfinite::simt
