// LayerNorm forward: y = (x - mean) / sqrt(var + eps) * weight + bias, row by row.
//
// Bytes: x read and y written once in memory (the second and third pass over a row hit the cache): 2 b per
// element. Floor: copy bandwidth. Sums: fp32 vectors over blocks of at most kBlock elements, blocks added in
// double.
//
// Mean: a first sum gives mean_hi; the deviations d = x - mean_hi then give what fp32 lost of it,
// mean_lo = sum(d) / n, and var = (sum(d * d) - sum(d) * mean_lo) / n (the two-pass algorithm with a
// correction term; Chan, Golub and LeVeque 1983). Both parts are subtracted, so the error does not grow with
// mean / std.
//
// Range: where var is not finite, or var + eps is so small that squares underflow, the row is done again
// times a power of two, with eps times its square. A row of NaN or infinity becomes NaN; no other row is
// touched. var + eps = 0 (a constant row with eps 0): rstd is stored as 0, so that y = bias and dx = 0.
#include "cpu/layer_norm.h"

#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int64_t kBlock = 4096;
constexpr int kLanes = 4;  // independent accumulators, to cover the latency of an addition

template <class A>
struct RowStats {
  A mean_hi, mean_lo, rstd, scale;
};

// Below this, var + eps has lost bits to squares that underflowed (fp32: 2^-149, so 2^-120 keeps 29 bits).
template <class A>
constexpr double kSmallestVariance = std::is_same_v<A, float> ? 0x1p-120 : 0x1p-960;
template <class A>
constexpr double kLargestVariance = std::is_same_v<A, float> ? 0x1p126 : 0x1p1000;

// term(vector of x, n valid) is added up over the row: fp32 vectors within a block, double across blocks.
template <class A, int kSums, class Term>
ALLFINITE_INLINE void sum_row(int64_t n, double (&total)[kSums], Term term) {
  constexpr int w = kWidth<A>;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = start + kBlock < n ? start + kBlock : n;
    Vec<A> lane[kLanes][kSums] = {};
    int64_t i = start;
    for (; i + kLanes * w <= stop; i += kLanes * w) {
      for (int u = 0; u < kLanes; ++u) {
        term(lane[u], i + u * w, w);
      }
    }
    for (; i < stop; i += w) {
      term(lane[0], i, stop - i < w ? stop - i : w);
    }
    for (int s = 0; s < kSums; ++s) {
      total[s] += static_cast<double>(sum_lanes<A>((lane[0][s] + lane[1][s]) + (lane[2][s] + lane[3][s])));
    }
  }
}

template <class A, class T, bool kScaled>
RowStats<A> row_stats(const T* x, int64_t n, A scale, double eps, double& variance) {
  const auto at = [&](int64_t i, int64_t count) {
    const Vec<A> v = count == kWidth<A> ? load<A>(x + i) : load_partial<A>(x + i, count);
    return kScaled ? v * scale : v;
  };
  double sum[1] = {};
  sum_row<A>(n, sum, [&](Vec<A>* lane, int64_t i, int64_t count) { lane[0] += at(i, count); });
  const A mean_hi = static_cast<A>(sum[0] / static_cast<double>(n));

  double moments[2] = {};
  sum_row<A>(n, moments, [&](Vec<A>* lane, int64_t i, int64_t count) {
    Vec<A> d = at(i, count) - mean_hi;
    if (count < kWidth<A>) {  // lanes beyond the row hold 0 - mean: take them out
      A lanes[kWidth<A>] = {};
      for (int64_t k = 0; k < count; ++k) {
        lanes[k] = d[k];
      }
      d = load<A>(lanes);
    }
    lane[0] += d;
    lane[1] = fma(d, d, lane[1]);
  });
  const double mean_lo = moments[0] / static_cast<double>(n);
  const double raw = (moments[1] - moments[0] * mean_lo) / static_cast<double>(n);
  variance = raw < 0 ? 0 : raw;  // written so that NaN stays NaN
  const double total = variance + eps * static_cast<double>(scale) * static_cast<double>(scale);
  const double rstd = total == 0 ? 0 : 1 / __builtin_sqrt(total);
  return {mean_hi, static_cast<A>(mean_lo), static_cast<A>(rstd), scale};
}

// A power of two that brings the largest magnitude of the row near 1; 1 where there is none or it is not
// finite.
template <class A, class T>
A rescue_scale(const T* x, int64_t n) {
  A largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A v = __builtin_fabs(widen<A>(x[i]));
    if (!(v <= std::numeric_limits<A>::max())) {
      return 1;
    }
    largest = v > largest ? v : largest;
  }
  if (largest == 0) {
    return 1;
  }
  int exponent = 0;
  __builtin_frexp(static_cast<double>(largest), &exponent);
  constexpr int kLimit = std::numeric_limits<A>::max_exponent - 2;  // the scale and its inverse stay normal
  exponent = exponent > kLimit ? kLimit : exponent < -kLimit ? -kLimit : exponent;
  return static_cast<A>(__builtin_ldexp(1.0, -exponent));
}

template <class A, class T, class W, bool kScaled>
void normalize_row(const T* x, const W* weight, const W* bias, T* y, int64_t n, const RowStats<A>& s) {
  constexpr int w = kWidth<A>;
  const auto one = [&](Vec<A> v, Vec<A> g, Vec<A> b) {
    const Vec<A> xhat = (((kScaled ? v * s.scale : v) - s.mean_hi) - s.mean_lo) * s.rstd;
    return fma(xhat, g, b);
  };
  const Vec<A> ones = splat(A(1)), zeros = {};
  int64_t i = 0;
  for (; i + w <= n; i += w) {
    store(y + i, one(load<A>(x + i), weight ? load<A>(weight + i) : ones, bias ? load<A>(bias + i) : zeros));
  }
  if (i < n) {
    const int64_t m = n - i;
    store_partial(y + i,
                  one(load_partial<A>(x + i, m), weight ? load_partial<A>(weight + i, m) : ones,
                      bias ? load_partial<A>(bias + i, m) : zeros),
                  m);
  }
}

template <class T, class W>
void forward_rows(const LayerNormForwardArgs& a) {
  using A = Accumulate<T>;
  const W* weight = static_cast<const W*>(a.weight);
  const W* bias = static_cast<const W*>(a.bias);
  for (int64_t row = a.begin; row < a.end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.n;
    T* y = static_cast<T*>(a.y) + row * a.n;
    double variance = 0;
    RowStats<A> stats = row_stats<A, T, false>(x, a.n, A(1), a.eps, variance);
    const bool in_range = variance <= kLargestVariance<A> && variance + a.eps >= kSmallestVariance<A>;
    const A scale = in_range ? A(1) : rescue_scale<A>(x, a.n);
    if (scale == 1) {
      normalize_row<A, T, W, false>(x, weight, bias, y, a.n, stats);
    } else {
      stats = row_stats<A, T, true>(x, a.n, scale, a.eps, variance);
      normalize_row<A, T, W, true>(x, weight, bias, y, a.n, stats);
    }
    __builtin_memcpy(static_cast<A*>(a.stats) + row * kLayerNormStats, &stats, sizeof stats);
  }
}

}  // namespace

void layer_norm_forward(const LayerNormForwardArgs& args) {
  visit_with_weight(args.dtype, args.weight_dtype, [&](auto t, auto w) {
    forward_rows<typename decltype(t)::type, typename decltype(w)::type>(args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
