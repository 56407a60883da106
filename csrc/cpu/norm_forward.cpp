// Norm forward, row by row: y = xhat * weight + bias, of x or of x + residual, which is stored as well.
// layer_norm: xhat = (x - mean) / sqrt(var + eps); rms_norm: xhat = x / sqrt(mean(x^2) + eps).
//
// Bytes: x read and y written once in memory (further passes over a row hit the cache): 2 b per element; with a
// residual 2 b and twice the residual's. Floor: copy bandwidth.
//
// Mean: added in double (rows of 16-bit values: of 4 values in fp32 first, which is exact or nearly so), kept as two
// numbers of the compute type, mean_hi + mean_lo. Both are subtracted, so the error does not grow with mean / std.
// Variance: of the deviations from a number near the mean, in short fp32 chains (row_sum.h). fp64 has no wider type:
// there mean_lo is the mean of the deviations (the two-pass algorithm with a correction term; Chan, Golub and LeVeque
// 1983).
//
// Range: where var is not finite, or so small that squares or the mean's low part underflow, the row is done again
// times a power of two, with eps times its square. A row of NaN or infinity becomes NaN; no other row is
// touched. var + eps = 0 (a constant row with eps 0): rstd is stored as 0, so that y = bias and dx = 0.
#include "cpu/norm.h"
#include "cpu/norm_row.h"
#include "cpu/row_sum.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 4;  // independent accumulators, to cover the latency of an addition

// Below this, var + eps has lost bits to squares that underflowed (fp32: 2^-149, so 2^-120 keeps 29 bits).
template <class A>
constexpr double kSmallestVariance = std::is_same_v<A, float> ? 0x1p-120 : 0x1p-960;
// From this mean on the deviations are multiples of a normal number: var may then be lost beside eps. Beside an eps
// of 1 and more, smaller rows are 0 in any case.
template <class A>
constexpr A kSmallestMean = std::is_same_v<A, float> ? A(0x1p-100f) : A(0x1p-900);
template <class A>
constexpr double kLargestVariance = std::is_same_v<A, float> ? 0x1p126 : 0x1p1000;

// What a row's first sum is: not needed (rms_norm), of values of at most 11 bits, of any.
enum class Sum { kNone, kShort, kAny };

struct Moments {
  double sum;      // fp32: of x. fp64: of x - centre
  double squares;  // of (x - centre)^2
};

template <class A, Sum kSum>
Moments moments(const A* x, int64_t n, A centre) {
  constexpr int w = kWidth<A>;
  constexpr int64_t step = kLanes * w, block = kChain * step;
  WideSum<A> total[kLanes], squares;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> square[kLanes] = {};
    int64_t i = start;
    for (; i + step <= stop; i += step) {
      Vec<A> v[kLanes], d[kLanes];
      for (int u = 0; u < kLanes; ++u) {
        v[u] = load<A>(x + i + u * w);
        d[u] = kSum == Sum::kNone ? v[u] : v[u] - centre;
        square[u] = fma(d[u], d[u], square[u]);
      }
      if constexpr (kSum == Sum::kShort) {
        total[0].add((v[0] + v[1]) + (v[2] + v[3]));
      } else if constexpr (kSum == Sum::kAny) {
        for (int u = 0; u < kLanes; ++u) {
          total[u].add(std::is_same_v<A, double> ? d[u] : v[u]);
        }
      }
    }
    for (int u = 0; i < stop; i += w, ++u) {
      const int64_t count = stop - i < w ? stop - i : w;
      const Vec<A> v = load_lanes<A>(x + i, count);
      Vec<A> d = kSum == Sum::kNone ? v : v - centre;
      if (count < w) {
        d = first_lanes(d, count);
      }
      square[u] = fma(d, d, square[u]);
      if constexpr (kSum != Sum::kNone) {
        total[u].add(std::is_same_v<A, double> ? d : v);
      }
    }
    squares.add((square[0] + square[1]) + (square[2] + square[3]));
  }
  for (int u = 1; u < kLanes; ++u) {
    total[0].add(total[u]);
  }
  return {total[0].total(), squares.total()};
}

// A number near the mean of most rows: the mean of its first 16 elements.
float first_mean(const float* x, int64_t n) {
  constexpr int w = kWidth<float>;
  if (n < 16) {
    return x[0];
  }
  Vec<float> sum = load<float>(x);
  for (int i = w; i < 16; i += w) {
    sum += load<float>(x + i);
  }
  return sum_lanes<float>(sum) / 16;
}

// mean_hi, mean_lo and the variance; for rms_norm 0, 0 and the mean square.
template <Sum kSum>
double centre_row(const float* x, int64_t n, RowStats<float>& s) {
  const double count = static_cast<double>(n);
  if constexpr (kSum == Sum::kNone) {
    return moments<float, kSum>(x, n, 0).squares / count;
  }
  float centre = first_mean(x, n);
  Moments m = moments<float, kSum>(x, n, centre);
  const double mean = m.sum / count;
  s.mean_hi = static_cast<float>(mean);
  s.mean_lo = static_cast<float>(mean - static_cast<double>(s.mean_hi));
  double off = mean - static_cast<double>(centre);
  if (off * off * count > 0.25 * m.squares) {  // too far off: the subtraction below would lose bits
    centre = s.mean_hi;
    m = moments<float, kSum>(x, n, centre);
    off = mean - static_cast<double>(centre);
  }
  return m.squares / count - off * off;
}
template <Sum kSum>
double centre_row(const double* x, int64_t n, RowStats<double>& s) {
  const double count = static_cast<double>(n);
  Moments m = moments<double, kSum>(x, n, 0);
  if constexpr (kSum != Sum::kNone) {
    s.mean_hi = m.sum / count;
    m = moments<double, kSum>(x, n, s.mean_hi);
    s.mean_lo = m.sum / count;
    m.squares -= m.sum * s.mean_lo;
  }
  return m.squares / count;
}

template <Sum kSum, class A>
RowStats<A> row_stats(const A* x, int64_t n, A scale, double eps, double& variance) {
  RowStats<A> s = {0, 0, 0, scale};
  variance = centre_row<kSum>(x, n, s);
  variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
  const double total = variance + eps * static_cast<double>(scale) * static_cast<double>(scale);
  // Beyond A only for a constant row with an eps below 2^-254; its xhat must be 0, not 0 * inf.
  constexpr double kLargestRstd = std::numeric_limits<A>::max();
  const double exact = total == 0 ? 0 : 1 / __builtin_sqrt(total);
  s.rstd = static_cast<A>(exact > kLargestRstd ? kLargestRstd : exact);
  return s;
}

// A power of two that brings the largest magnitude of the row near 1; 1 where there is none or one is not finite.
// At most 2^126 (fp64: 2^1022), so that rstd stays normal beside any eps below 1.
template <class A>
A rescue_scale(const A* x, int64_t n) {
  Vec<A> largest_lanes = {}, poison = {};
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> v = load_lanes<A>(x + i, count);
    largest_lanes = max(abs(v), largest_lanes);
    poison += v * 0;  // NaN from an infinity or a NaN
  });
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

template <class A>
bool in_range(const RowStats<A>& s, double variance, double eps, bool rms) {
  const bool small_is_exact = rms || __builtin_fabs(s.mean_hi) >= kSmallestMean<A> || eps >= 1;
  return variance <= kLargestVariance<A> && (small_is_exact ? variance + eps : variance) >= kSmallestVariance<A>;
}

// Statistics of the row; where it leaves the range, *x becomes the row times a power of two, in `buffer`.
template <Sum kSum, class A>
RowStats<A> checked_stats(const A*& x, int64_t n, double eps, A* buffer) {
  double variance = 0;
  RowStats<A> plain = row_stats<kSum>(x, n, A(1), eps, variance);
  const A scale = in_range(plain, variance, eps, kSum == Sum::kNone) ? A(1) : rescue_scale(x, n);
  if (scale == 1) {
    plain.rstd += static_cast<A>(variance * 0);  // NaN for an infinity: 1 / inf would be 0, and dx of the row with it
    return plain;
  }
  for_each_vector<A>(
      n, [&](int64_t i, int64_t count) { store_lanes(buffer + i, load_lanes<A>(x + i, count) * scale, count); });
  x = buffer;
  return row_stats<kSum>(x, n, scale, eps, variance);
}

template <class A, class T>
void write_row(const A* x, const A* weight, const A* bias, T* y, int64_t n, const RowStats<A>& s) {
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> xhat = normalised(load_lanes<A>(x + i, count), s);
    const Vec<A> g = load_lanes<A>(weight + i, count), b = load_lanes<A>(bias + i, count);
    Vec<A> result = fma(xhat, g, b);
    if constexpr (!kFusedMultiplyAdd) {  // the product alone may leave the range although the sum does not
      const Vec<A> quarter = (xhat * A(0.25)) * g + b * A(0.25);
      result = result - result == 0 ? result : quarter * A(4);
    }
    store_lanes(y + i, result, count);
  });
}

// x + residual, rounded to X and stored; and the same as A, in `sum` or in `buffer`.
template <class A, class T, class X>
const A* add_residual(const T* x, const X* residual, X* sum, int64_t n, A* buffer) {
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    store_lanes(sum + i, load_lanes<A>(x + i, count) + load_lanes<A>(residual + i, count), count);
  });
  return widened(static_cast<const X*>(sum), n, buffer);
}

// T: of x and y. X: of what is normalised.
template <class T, class X>
void forward_rows(const NormForwardArgs& a) {
  using A = Accumulate<T>;
  const int64_t stride = norm_row_bytes(a.n, a.dtype) / static_cast<int64_t>(sizeof(A));
  A* buffer = static_cast<A*>(a.scratch);
  const A* weight = parameter<A>(a.weight, a.weight_dtype, a.n, A(1), buffer + stride);
  const A* bias = parameter<A>(a.bias, a.weight_dtype, a.n, A(0), buffer + 2 * stride);
  constexpr Sum kSum = sizeof(X) == 2 ? Sum::kShort : Sum::kAny;
  for (int64_t row = a.begin; row < a.end; ++row) {
    const int64_t at = row * a.n;
    const T* x = static_cast<const T*>(a.x) + at;
    const A* values =
        a.residual ? add_residual(x, static_cast<const X*>(a.residual) + at, static_cast<X*>(a.sum) + at, a.n, buffer)
                   : widened(x, a.n, buffer);
    const RowStats<A> stats =
        a.rms ? checked_stats<Sum::kNone>(values, a.n, a.eps, buffer) : checked_stats<kSum>(values, a.n, a.eps, buffer);
    write_row(values, weight, bias, static_cast<T*>(a.y) + at, a.n, stats);
    write_stats(a.stats, row, a.rms, stats);
  }
}

}  // namespace

void norm_forward(const NormForwardArgs& args) {
  visit_with_weight(args.dtype, args.residual ? args.residual_dtype : args.dtype, [&](auto t, auto x) {
    forward_rows<typename decltype(t)::type, typename decltype(x)::type>(args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
