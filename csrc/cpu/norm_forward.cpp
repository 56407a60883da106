// Norm forward, row by row: y = xhat * weight + bias, of x or of x + residual, which is stored as well.
// layer_norm: xhat = (x - mean) / sqrt(var + eps); rms_norm: xhat = x / sqrt(mean(x^2) + eps).
//
// Bytes: x read and y written once in memory (further passes over a row hit the cache): 2 b per element; with a
// residual 2 b and twice the residual's. Floor: copy bandwidth. Measured on a 2-core Xeon with AVX-512, one thread, n
// of 768 to 4096, beyond the caches: 17 to 24 GB/s in fp32, where a copy past the caches has 22 to 33; 13 to 18 in 16
// bits. Between the two: in fp32 the conversions to double of the mean's sum, in 16 bits widening twice and rounding
// (bf16 rounds in 8 instructions a vector). Short rows (384, in cache: 36 GB/s in fp32) also wait for the scalar end of
// a row; tensors of 1 MB with a residual (27 GB/s) for the third-level cache, because four of them leave the second.
//
// Rows of 16 bits are widened in registers, once in each pass: two rows of fp32 beside weight and bias would not stay
// in the first-level cache. Sums: the mean in double (rows of 16-bit values: of 4 values in fp32 first, which is exact
// or nearly so), kept as two numbers of the compute type, mean_hi + mean_lo; the squares in the same pass, in short
// fp32 chains (row_sum.h), and once more from the mean where the mean is larger than the deviation. So the error does
// not grow with mean / std. fp64 has no wider type: there mean_lo is the mean of the deviations (docs/numerics.md).
//
// Range: where var is not finite, or so small that squares or the mean's low part underflow, the row is done again
// times a power of two, with eps times its square; a row of one number needs no sums. A row of NaN or infinity becomes
// NaN; no other row is touched. var + eps = 0 (a constant row with eps 0): rstd is stored as 0, so that y = bias and
// dx = 0.
#include "cpu/norm.h"
#include "cpu/norm_row.h"
#include "cpu/row_sum.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kRows = kNormBlockRows;
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
  double sum;      // of x - centre
  double squares;  // of (x - centre)^2
};

// fp32: with a sum the centre is 0.
template <class A, Sum kSum, class S>
Moments moments(const S* x, int64_t n, A centre) {
  constexpr int w = kWidth<A>;
  constexpr int64_t step = kLanes * w, block = kChain * step;
  constexpr bool kCentred = std::is_same_v<A, double> || kSum == Sum::kNone;
  WideSum<A> total[kLanes], squares;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> square[kLanes] = {};
    int64_t i = start;
    for (; i + step <= stop; i += step) {
      Vec<A> d[kLanes];
      for (int u = 0; u < kLanes; ++u) {
        const Vec<A> v = load<A>(x + i + u * w);
        d[u] = kCentred ? v - centre : v;
        square[u] = fma(d[u], d[u], square[u]);
      }
      if constexpr (kSum == Sum::kShort) {
        total[0].add((d[0] + d[1]) + (d[2] + d[3]));
      } else if constexpr (kSum == Sum::kAny) {
        for (int u = 0; u < kLanes; ++u) {
          if constexpr (kCentred || !std::is_same_v<A, S>) {
            total[u].add(d[u]);
          } else {
            total[u].add(x + i + u * w);
          }
        }
      }
    }
    for (; i < stop; i += w) {
      const int64_t count = stop - i < w ? stop - i : w;
      const Vec<A> v = load_some<A>(x + i, count);
      const Vec<A> d = kCentred ? first_lanes(v - centre, count) : v;
      square[0] = fma(d, d, square[0]);
      if constexpr (kSum != Sum::kNone) {
        total[0].add(d);
      }
    }
    squares.add((square[0] + square[1]) + (square[2] + square[3]));
  }
  for (int u = 1; u < kLanes; ++u) {
    total[0].add(total[u]);
  }
  return {total[0].total(), squares.total()};
}

// Sets the mean and returns the variance; for rms_norm leaves the mean 0 and returns the mean square.
template <Sum kSum, class S>
double centre_row(const S* x, int64_t n, RowStats<float>& s) {
  const double count = static_cast<double>(n);
  const Moments m = moments<float, kSum>(x, n, 0);
  if constexpr (kSum == Sum::kNone) {
    return m.squares / count;
  }
  const double mean = m.sum / count;
  s.mean_hi = static_cast<float>(mean);
  s.mean_lo = static_cast<float>(mean - static_cast<double>(s.mean_hi));
  // Else the difference would lose more than a bit, or the squares left the range although the deviations need not.
  const bool accurate = mean * m.sum <= 0.5 * m.squares && m.squares <= std::numeric_limits<float>::max();
  if (!accurate) {
    const double off = s.mean_lo;
    return moments<float, Sum::kNone>(x, n, s.mean_hi).squares / count - off * off;
  }
  return m.squares / count - mean * mean;
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

template <Sum kSum, class A, class S>
RowStats<A> row_stats(const S* x, int64_t n, A scale, double eps, double& variance) {
  RowStats<A> s = {0, 0, 0, scale, 0};
  variance = centre_row<kSum>(x, n, s);
  variance = variance < 0 ? 0 : variance;  // written so that NaN stays NaN
  const double total = variance + eps * static_cast<double>(scale) * static_cast<double>(scale);
  s.rstd = static_cast<A>(total == 0 ? 0 : 1 / __builtin_sqrt(total));
  return s;
}

// A power of two that brings the largest magnitude of the row near 1; 1 where there is none or one is not finite.
// At most 2^126, so that rstd stays normal beside any eps below 1 (fp64: such that eps times its square is in range).
template <class A, class S>
A rescue_scale(const S* x, int64_t n, double eps) {
  Vec<A> largest_lanes = {}, poison = {};
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> v = load_some<A>(x + i, count);
    largest_lanes = max(abs(v), largest_lanes);
    poison += v * 0;  // NaN from an infinity or a NaN
  });
  const A largest = max_lanes<A>(largest_lanes);
  if (largest == 0 || sum_lanes<A>(poison) != 0) {
    return 1;
  }
  int exponent = 0, of_eps = 0;
  __builtin_frexp(static_cast<double>(largest), &exponent);
  __builtin_frexp(eps, &of_eps);
  constexpr int kLimit = std::numeric_limits<A>::max_exponent - 2;  // the scale and its inverse stay normal
  const int beside_eps = (1000 - of_eps) / 2;
  const int most = std::is_same_v<A, double> && eps > 0 && beside_eps < kLimit ? beside_eps : kLimit;
  exponent = exponent > kLimit ? kLimit : exponent < -most ? -most : exponent;
  return static_cast<A>(__builtin_ldexp(1.0, -exponent));
}

template <class A, class S>
bool all_equal(const S* x, int64_t n, A value) {
  Vec<A> largest = {}, poison = {};
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> difference = first_lanes(load_some<A>(x + i, count) - value, count);
    largest = max(largest, abs(difference));
    poison += difference * 0;
  });
  return max_lanes<A>(largest) == 0 && sum_lanes<A>(poison) == 0;
}

// Of a row of one number (rms_norm: 0): xhat is 0, and dx has the factor 1 / sqrt(eps) whatever the number is.
template <class A>
RowStats<A> constant_stats(A number, double eps) {
  const double rstd = eps == 0 ? 0 : 1 / __builtin_sqrt(eps);
  if (rstd <= std::numeric_limits<A>::max()) {
    return {number, 0, static_cast<A>(rstd), 1, 0};
  }
  int exponent = 0;
  const double fraction = __builtin_frexp(rstd, &exponent);
  return {number, 0, static_cast<A>(fraction), 1, exponent};
}

template <class A>
bool in_range(const RowStats<A>& s, double variance, double eps, bool rms) {
  const bool small_is_exact = rms || __builtin_fabs(s.mean_hi) >= kSmallestMean<A> || eps >= 1;
  return variance <= kLargestVariance<A> && (small_is_exact ? variance + eps : variance) >= kSmallestVariance<A>;
}

// Rescues a row that is not in range: statistics of the row times a power of two, which is written to `buffer` (true),
// or of a row of one number.
template <Sum kSum, class A, class S>
bool rescue(const S* x, int64_t n, double eps, double variance, A* buffer, RowStats<A>& s) {
  if (!in_range(s, variance, eps, kSum == Sum::kNone)) {
    const A number = kSum == Sum::kNone ? A(0) : widen<A>(x[0]);
    if (all_equal<A>(x, n, number)) {
      s = constant_stats(number, eps);
      return false;
    }
    const A scale = rescue_scale<A>(x, n, eps);
    if (scale != 1) {
      for_each_vector<A>(
          n, [&](int64_t i, int64_t count) { store_some(buffer + i, load_some<A>(x + i, count) * scale, count); });
      s = row_stats<kSum>(static_cast<const A*>(buffer), n, scale, eps, variance);
      return true;
    }
  }
  s.rstd += static_cast<A>(variance * 0);  // NaN for an infinity: 1 / inf would be 0, and dx of the row with it
  return false;
}

template <bool kBias, class A>
ALLFINITE_INLINE Vec<A> affine(Vec<A> xhat, Vec<A> weight, Vec<A> bias) {
  if constexpr (!kBias) {
    return xhat * weight;
  }
  const Vec<A> result = fma(xhat, weight, bias);
  if constexpr (!kFusedMultiplyAdd) {  // the product alone may leave the range although the sum does not
    const Vec<A> quarter = (xhat * A(0.25)) * weight + bias * A(0.25);
    return result - result == 0 ? result : quarter * A(4);
  }
  return result;
}

// What is fetched while a block is written: the inputs of the next.
template <class T, class X>
struct Ahead {
  const T* x;
  const X* residual;
};

// y of kCount rows, for which weight and bias are loaded once. S: of the rows at x; X: of what is fetched ahead.
template <Place kPlace, int kCount, bool kCentred, class A, class S, class T, class X>
void write_rows(const S* const* x, const A* weight, const A* bias, T* y, int64_t n, const RowStats<A>* stats,
                const Ahead<T, X>& ahead) {
  Normalise<kCentred, A> normalise[kCount];
  for (int r = 0; r < kCount; ++r) {
    normalise[r] = Normalise<kCentred, A>(stats[r]);
  }
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> g = load_some<A>(weight + i, count);
    const Vec<A> b = kCentred ? load_some<A>(bias + i, count) : Vec<A>{};
    Vec<A> v[kCount];
    for (int r = 0; r < kCount; ++r) {  // before the first store: one at the same offset in a page would delay them
      v[r] = load_some<A>(x[r] + i, count);
    }
    for (int r = 0; r < kCount; ++r) {
      store_output<kPlace>(y + r * n + i, affine<kCentred, A>(normalise[r](v[r]), g, b), count);
      prefetch<kPlace>(ahead.x, r * n + i);
      if (ahead.residual) {
        prefetch<kPlace>(ahead.residual, r * n + i);
      }
    }
  });
}

// x + residual, rounded to X and stored; what is read again soon is in `kept`, which is `sum` itself where that stays
// in the caches.
template <Place kPlace, class A, class T, class X>
void add_residual(const T* x, const X* residual, X* sum, int64_t n, X* kept) {
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> total = load_some<A>(x + i, count) + load_some<A>(residual + i, count);
    if constexpr (kPlace == Place::kStreamed) {
      store_some(kept + i, total, count);
    }
    store_output<kPlace>(sum + i, total, count);
  });
}

// T: of x and y. X: of what is normalised.
template <Place kPlace, Sum kSum, class T, class X>
void forward_rows(const NormForwardArgs& a) {
  using A = Accumulate<T>;
  constexpr bool kCentred = kSum != Sum::kNone;
  const int64_t n = a.n, stride = norm_row_bytes(n, a.dtype) / static_cast<int64_t>(sizeof(A));
  A* scratch = static_cast<A*>(a.scratch);
  const A* weight = parameter<A>(a.weight, a.weight_dtype, n, A(1), scratch);
  const A* bias = kCentred ? parameter<A>(a.bias, a.weight_dtype, n, A(0), scratch + stride) : nullptr;
  for (int64_t first = a.begin; first < a.end; first += kRows) {
    const int count = a.end - first < kRows ? static_cast<int>(a.end - first) : kRows;
    const T* x = static_cast<const T*>(a.x) + first * n;
    const X* residual = static_cast<const X*>(a.residual);
    T* y = static_cast<T*>(a.y) + first * n;
    const X* values[kRows];
    A* buffer[kRows];
    RowStats<A> stats[kRows];
    double variance[kRows];
    bool rescued[kRows];
    for (int r = 0; r < count; ++r) {
      buffer[r] = scratch + (2 + r) * stride;
      if (residual) {
        X* sum = static_cast<X*>(a.sum) + (first + r) * n;
        X* kept = kPlace == Place::kStreamed ? reinterpret_cast<X*>(scratch + (2 + kRows + r) * stride) : sum;
        add_residual<kPlace, A>(x + r * n, residual + (first + r) * n, sum, n, kept);
        values[r] = kept;
      } else {
        values[r] = reinterpret_cast<const X*>(x + r * n);  // X is T
      }
    }
    for (int r = 0; r < count; ++r) {  // apart, so that the scalar end of a row overlaps with the next row's sums
      stats[r] = row_stats<kSum, A>(values[r], n, A(1), a.eps, variance[r]);
    }
    bool plain = count == kRows;
    for (int r = 0; r < count; ++r) {
      rescued[r] = rescue<kSum>(values[r], n, a.eps, variance[r], buffer[r], stats[r]);
      write_stats(a.stats, first + r, a.rms, stats[r]);
      plain = plain && !rescued[r];
    }
    const Ahead<T, X> ahead = {x + kRows * n, residual ? residual + (first + kRows) * n : nullptr};
    if (plain) {
      write_rows<kPlace, kRows, kCentred>(values, weight, bias, y, n, stats, ahead);
      continue;
    }
    for (int r = 0; r < count; ++r) {
      const A* scaled = buffer[r];
      if (rescued[r]) {
        write_rows<kPlace, 1, kCentred>(&scaled, weight, bias, y + r * n, n, stats + r, ahead);
      } else {
        write_rows<kPlace, 1, kCentred>(values + r, weight, bias, y + r * n, n, stats + r, ahead);
      }
    }
  }
  if (kPlace == Place::kStreamed) {
    finish_streaming();
  }
}

}  // namespace

void norm_forward(const NormForwardArgs& args) {
  visit_with_weight(args.dtype, args.residual ? args.residual_dtype : args.dtype, [&](auto t, auto x) {
    using T = typename decltype(t)::type;
    using X = typename decltype(x)::type;
    constexpr Sum kSum = sizeof(X) == 2 ? Sum::kShort : Sum::kAny;
    const Place place =
        place_of(args.rows, args.n * static_cast<int64_t>(sizeof(T)), args.residual ? 4 : 2, args.y, args.sum);
    visit_place(place, [&](auto p) {
      constexpr Place kPlace = decltype(p)::value;
      args.rms ? forward_rows<kPlace, Sum::kNone, T, X>(args) : forward_rows<kPlace, kSum, T, X>(args);
    });
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
