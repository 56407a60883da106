// exp and tanh on vectors. float: own polynomials, at most 2 ulp off where the result is normal, 0 below 2^-126;
// double: the C library's, lane by lane. NaN stays NaN.
#pragma once
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2. exp(0) is exactly 1. x <= 88.
ALLFINITE_INLINE Vec<float> exp(Vec<float> x) {
  constexpr float kLowest = -87.33654f;     // ln 2^-126
  constexpr float kRound = 0x1.8p23f;       // adding it rounds to an integer, which is left in the low bits
  constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits: n times it is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  const Vec<float> clamped = x < kLowest ? splat(kLowest) : x;
  const Vec<float> shifted = fma(clamped, splat(0x1.715476p0f), splat(kRound));
  const Vec<float> n = shifted - kRound;
  const Vec<float> r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), clamped));
  // (exp(r) - 1 - r) / r^2: minimax of the relative error of exp, 3.3e-9.
  Vec<float> p = splat(0x1.6a1a72p-10f);
  p = fma(p, r, splat(0x1.123fc6p-7f));
  p = fma(p, r, splat(0x1.555916p-5f));
  p = fma(p, r, splat(0x1.55548ap-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n as a factor, so that a NaN in p survives whatever its n is.
  const Vec<float> power = (Vec<float>)(((Vec<uint32_t>)shifted + (127u - 0x4b400000u)) << 23);
  return x < kLowest ? Vec<float>{} : p * power;
}

ALLFINITE_INLINE Vec<double> exp(Vec<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) {
    x[i] = __builtin_exp(x[i]);
  }
  return x;
}

ALLFINITE_INLINE Vec<float> tanh(Vec<float> x) {
  const Vec<float> magnitude = abs(x);
  const Vec<float> square = x * x;
  // |x| < 0.625: x + x^3 p(x^2), minimax, 4.4e-9.
  Vec<float> p = splat(-0x1.75da22p-8f);
  p = fma(p, square, splat(0x1.5224f6p-6f));
  p = fma(p, square, splat(-0x1.b83c1cp-5f));
  p = fma(p, square, splat(0x1.110726p-3f));
  p = fma(p, square, splat(-0x1.555532p-2f));
  const Vec<float> near_zero = fma(p * square, x, x);
  const Vec<float> e = exp(magnitude * -2.0f);
  const Vec<float> far = 1.0f - 2.0f * e / (1.0f + e);
  return magnitude < 0.625f ? near_zero : x < 0.0f ? -far : far;
}

ALLFINITE_INLINE Vec<double> tanh(Vec<double> x) {
  for (int i = 0; i < kWidth<double>; ++i) {
    x[i] = __builtin_tanh(x[i]);
  }
  return x;
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
