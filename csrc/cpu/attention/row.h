// What the attention kernels do with one row: powers of two, exp, maximum and sum over the lanes, the marker of a
// masked weight, reading and writing.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/math.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
constexpr int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
constexpr int64_t larger(int64_t a, int64_t b) {
  return a < b ? b : a;
}

// factor * 2^exponent as a product of two numbers of A, neither of which leaves its range where the whole may.
template <class A>
struct Factor {
  Factor(double factor, int exponent) {
    int own = 0;
    const double fraction = __builtin_frexp(factor, &own);
    const int total = exponent + own;
    const bool in_range = total > std::numeric_limits<A>::min_exponent && total < std::numeric_limits<A>::max_exponent;
    const int half = in_range ? total : total / 2;
    first = static_cast<A>(__builtin_ldexp(fraction, half));
    second = static_cast<A>(__builtin_ldexp(1.0, total - half));
  }
  A first, second;
};

// Packed values lie in [2^-range, 2^range] by their largest.
template <class A>
constexpr int kExponentRange = std::is_same_v<A, float> ? 40 : 200;

// What to take out of numbers whose largest is about 2^exponent, so that it lies in [2^-low, 2^high]: a power of two.
constexpr int exponent_out_of(int exponent, int low, int high) {
  return exponent > high ? exponent - high : exponent < -low ? exponent + low : 0;
}
template <class A>
int range_exponent(A largest) {
  int exponent = 0;
  __builtin_frexp(static_cast<double>(largest), &exponent);
  return largest == 0 ? 0 : exponent_out_of(exponent, kExponentRange<A>, kExponentRange<A>);
}

// exp(4 x): 2^n exp(r) with n = round(4 x / ln 2) and |r| <= ln 2 / 2; at most 2 ulp off where it is normal, 0 below
// 2^-126. exp(0) is exactly 1, NaN stays. x <= 22. All constants that meet x / 4 carry its power of 4, so a score that
// is kept divided by 4 costs no multiplication.
ALLFINITE_INLINE Vec<float> exp_of_quarters(Vec<float> x) {
  constexpr float kLowest = -87.33654f / 4;  // ln 2^-126
  constexpr float kRound = 0x1.8p23f;        // adding it rounds to an integer, which is left in the low bits
  constexpr float kLn2High = 0x1.62e4p-3f;   // a quarter of ln 2 in 15 bits: n times it is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-22f;
  const Vec<float> shifted = fma(x, splat(0x1.715476p2f), splat(kRound));
  const Vec<float> n = shifted - kRound;
  const Vec<float> r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), x));
  // exp(4 r) - 1 - 4 r = 16 r^2 p(4 r): minimax of the relative error of exp, 3.3e-9.
  Vec<float> p = splat(0x1.6a1a72p2f);
  p = fma(p, r, splat(0x1.123fc6p3f));
  p = fma(p, r, splat(0x1.555916p3f));
  p = fma(p, r, splat(0x1.55548ap3f));
  p = fma(p, r, splat(0x1.fffffcp2f));
  p = fma(p, r, splat(4.0f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(kLowest), _CMP_NLT_UQ), p, n);
#else
  // 2^n as a factor, so that a NaN in p survives whatever its n is.
  const Vec<float> power = (Vec<float>)(((Vec<uint32_t>)shifted + (127u - 0x4b400000u)) << 23);
  return x < kLowest ? Vec<float>{} : p * power;
#endif
}
ALLFINITE_INLINE Vec<double> exp_of_quarters(Vec<double> x) {
  return exp(x * 4.0);
}

// The lanes as a tree of halves in registers; the order of sum_lanes, so the same bits.
template <class A, class F>
ALLFINITE_INLINE A over_lanes(Vec<A> v, F f) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    __m256 a = f(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = f(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = f(b, _mm_movehl_ps(b, b));
    b = f(b, _mm_movehdup_ps(b));
    return b[0];
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<A, float>) {
    __m128 b = f(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    b = f(b, _mm_movehl_ps(b, b));
    b = f(b, _mm_movehdup_ps(b));
    return b[0];
  }
#endif
  A lanes[kWidth<A>];
  std::memcpy(lanes, &v, sizeof v);
  for (int step = kWidth<A> / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      lanes[i] = f(lanes[i], lanes[i + step]);
    }
  }
  return lanes[0];
}
template <class A>
ALLFINITE_INLINE A row_total(Vec<A> v) {
  return over_lanes<A>(v, [](auto a, auto b) { return a + b; });
}
template <class A>
ALLFINITE_INLINE A row_largest(Vec<A> v) {
  return over_lanes<A>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Whether a comparison holds in any lane.
template <class M>
ALLFINITE_INLINE bool any_lane(M comparison) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)comparison) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)comparison, (__m256i)comparison);
#else
  uint64_t words[sizeof comparison / sizeof(uint64_t)], any = 0;
  std::memcpy(words, &comparison, sizeof comparison);
  for (uint64_t word : words) {
    any |= word;
  }
  return any != 0;
#endif
}

// A masked weight is -0, which no weight that takes part is: 0 in a sum, and known again where a NaN must stay out.
template <class A>
ALLFINITE_INLINE auto is_masked(Vec<A> weight) {
  if constexpr (std::is_same_v<A, float>) {
    return (Vec<int32_t>)weight == std::numeric_limits<int32_t>::min();
  } else {
    return (Vec<int64_t>)weight == std::numeric_limits<int64_t>::min();
  }
}
template <class A>
ALLFINITE_INLINE bool is_masked(A weight) {
  return weight == 0 && __builtin_signbit(weight);
}

// row[begin .. end) = value.
template <class A>
ALLFINITE_INLINE void fill(A* row, int64_t begin, int64_t end, A value) {
  for (int64_t j = begin; j < end; ++j) {
    row[j] = value;
  }
}

// visit_dtype for the storage types that are computed in A.
template <class A, class F>
void visit_stored(DType dtype, F&& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(Tag<double>{});
  } else if (dtype != DType::kFloat64) {
    visit_dtype(dtype, [&](auto t) {
      if constexpr (!std::is_same_v<typename decltype(t)::type, double>) {
        f(t);
      }
    });
  }
}

// A row of a tensor as it is stored, widened, times factor.
template <class A>
void read_row(const AttentionTensor& t, int64_t batch, int64_t head, int64_t row, int64_t n, A factor, A* out) {
  visit_stored<A>(t.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(t.data) + batch * t.batch + head * t.head + row * t.row;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = widen<A>(from[i]) * factor;
    }
  });
}

// out = row * factor * 2^exponent, rounded to A by the first product and to T once at the end: the bits of the
// significand do not depend on the exponent (F4).
template <class A, class T>
ALLFINITE_INLINE void write_row(T* out, const A* row, int64_t n, A factor, int exponent) {
  constexpr int w = kWidth<A>;
  const bool split = exponent < -100 || exponent > 100;  // then as three factors, so that each is in range
  const int third = split ? exponent / 3 : 0;
  const A first = power_of_two<A>(third), second = power_of_two<A>(exponent - 2 * third);
  for (int64_t i = 0; i < n; i += w) {
    const Vec<A> given = load<A>(row + i), product = given * factor * first * first * second;
    const Vec<A> v = given == A(0) ? given : product;  // beyond any range 0 is still 0
    if (n - i < w) {
      store_partial(out + i, v, n - i);
    } else {
      store(out + i, v);
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
