// LayerNorm forward: y = (x - mean) / sqrt(var + eps) * weight + bias, row by row.
//
// Bytes: x read and y written once in memory (the second and third pass over a row hit the cache): 2 b per
// element. Floor: copy bandwidth.
//
// Mean: added in double, kept as two numbers of the compute type, mean_hi + mean_lo. Both are subtracted, so
// the error does not grow with mean / std. Variance: a second pass over the deviations, in short fp32 chains
// (row_sum.h). fp64 has no wider type: there mean_lo is the mean of the deviations, and the variance takes
// their sum out again (the two-pass algorithm with a correction term; Chan, Golub and LeVeque 1983).
//
// Range: where var is not finite, or so small that squares or the mean's low part underflow, the row is done again
// times a power of two, with eps times its square. A row of NaN or infinity becomes NaN; no other row is
// touched. var + eps = 0 (a constant row with eps 0): rstd is stored as 0, so that y = bias and dx = 0.
#include "cpu/layer_norm.h"

#include "cpu/row_sum.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 4;  // independent accumulators, to cover the latency of an addition

template <class A>
struct RowStats {
  A mean_hi, mean_lo, rstd, scale;
};

// Below this, var + eps has lost bits to squares that underflowed (fp32: 2^-149, so 2^-120 keeps 29 bits).
template <class A>
constexpr double kSmallestVariance = std::is_same_v<A, float> ? 0x1p-120 : 0x1p-960;
// From this mean on the deviations are multiples of a normal number: var may then be lost beside eps. Beside an eps
// of 1 and more, smaller rows are 0 in any case.
template <class A>
constexpr A kSmallestMean = std::is_same_v<A, float> ? A(0x1p-100f) : A(0x1p-900);
template <class A>
constexpr double kLargestVariance = std::is_same_v<A, float> ? 0x1p126 : 0x1p1000;

// The sum of value(i, count), a vector of which `count` lanes count and the others are 0, over a row.
template <class A, class Value>
ALLFINITE_INLINE double exact_sum(int64_t n, Value value) {
  constexpr int w = kWidth<A>;
  WideSum<A> lane[kLanes];
  int64_t i = 0;
  for (; i + kLanes * w <= n; i += kLanes * w) {
    for (int u = 0; u < kLanes; ++u) {
      lane[u].add(value(i + u * w, w));
    }
  }
  for (; i < n; i += w) {
    lane[0].add(value(i, n - i < w ? n - i : w));
  }
  for (int u = 1; u < kLanes; ++u) {
    lane[0].add(lane[u]);
  }
  return lane[0].total();
}

// The sum of deviation(i, count)^2 over a row and, for double, of the deviations.
template <class A, class Deviation>
ALLFINITE_INLINE void sum_moments(int64_t n, Deviation deviation, double& sum_of_squares, double& sum) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> squares, plain;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> square[kLanes] = {}, lane[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) {
      const Vec<A> d = deviation(i, count);
      square[u] = fma(d, d, square[u]);
      if constexpr (std::is_same_v<A, double>) {
        lane[u] += d;
      }
    };
    int64_t i = start;
    for (; i + kLanes * w <= stop; i += kLanes * w) {
      for (int u = 0; u < kLanes; ++u) {
        step(u, i + u * w, w);
      }
    }
    for (int u = 0; i < stop; i += w, ++u) {
      step(u, i, stop - i < w ? stop - i : w);
    }
    squares.add((square[0] + square[1]) + (square[2] + square[3]));
    plain.add((lane[0] + lane[1]) + (lane[2] + lane[3]));
  }
  sum_of_squares = squares.total();
  sum = plain.total();
}

template <class A, class T, bool kScaled>
RowStats<A> row_stats(const T* x, int64_t n, A scale, double eps, double& variance) {
  const auto at = [&](int64_t i, int64_t count) {
    const Vec<A> v = count == kWidth<A> ? load<A>(x + i) : load_partial<A>(x + i, count);
    return kScaled ? v * scale : v;
  };
  const double mean = exact_sum<A>(n, at) / static_cast<double>(n);
  const A mean_hi = static_cast<A>(mean);
  A mean_lo = static_cast<A>(mean - static_cast<double>(mean_hi));

  double squares, sum;
  sum_moments<A>(
      n,
      [&](int64_t i, int64_t count) {
        const Vec<A> d = (at(i, count) - mean_hi) - mean_lo;
        return count == kWidth<A> ? d : first_lanes(d, count);
      },
      squares, sum);
  if constexpr (std::is_same_v<A, double>) {
    mean_lo = sum / static_cast<double>(n);
    squares -= sum * mean_lo;
  }
  variance = squares < 0 ? 0 : squares / static_cast<double>(n);  // written so that NaN stays NaN
  const double total = variance + eps * static_cast<double>(scale) * static_cast<double>(scale);
  // Beyond A only for a constant row with an eps below 2^-254; its xhat must be 0, not 0 * inf.
  constexpr double kLargestRstd = std::numeric_limits<A>::max();
  const double exact = total == 0 ? 0 : 1 / __builtin_sqrt(total);
  const double rstd = exact > kLargestRstd ? kLargestRstd : exact;
  return {mean_hi, mean_lo, static_cast<A>(rstd), scale};
}

// A power of two that brings the largest magnitude of the row near 1; 1 where there is none or one is not finite.
// At most 2^126 (fp64: 2^1022), so that rstd stays normal beside any eps below 1.
template <class A, class T>
A rescue_scale(const T* x, int64_t n) {
  constexpr int w = kWidth<A>;
  Vec<A> largest_lanes = {}, poison = {};
  for (int64_t i = 0; i < n; i += w) {
    const Vec<A> v = n - i < w ? load_partial<A>(x + i, n - i) : load<A>(x + i);
    largest_lanes = max(abs(v), largest_lanes);
    poison += v * 0;  // NaN from an infinity or a NaN
  }
  const A largest = max_lanes<A>(largest_lanes);
  if (largest == 0 || sum_lanes<A>(poison) != 0) {
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
    const Vec<A> result = fma(xhat, g, b);
    if constexpr (!kFusedMultiplyAdd) {  // the product alone may leave the range although the sum does not
      const Vec<A> quarter = (xhat * A(0.25)) * g + b * A(0.25);
      return result - result == 0 ? result : quarter * A(4);
    }
    return result;
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
    const bool small_is_exact = __builtin_fabs(stats.mean_hi) >= kSmallestMean<A> || a.eps >= 1;
    const bool in_range =
        variance <= kLargestVariance<A> && (small_is_exact ? variance + a.eps : variance) >= kSmallestVariance<A>;
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
