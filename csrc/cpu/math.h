// exp and tanh on vectors. float: own polynomials, at most 2 ulp off where the result is normal, 0 below 2^-126;
// double: the C library's, lane by lane. NaN stays NaN.
#pragma once
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr double kLn2 = 0.6931471805599453;

#if defined(__AVX512F__)
// An exponent rounded to a multiple of 1 / 16, which adding kRoundToSixteenths leaves in the low bits, has its fraction
// looked up in a register; scalef takes the whole part.
constexpr float kRoundToSixteenths = 0x1.8p19f;

// 2^(k / 16), k = 0 to 15.
ALLFINITE_INLINE Vec<float> roots_of_two() {
  return Vec<float>{1.0f,          0x1.0b5586p0f, 0x1.172b84p0f, 0x1.2387a6p0f, 0x1.306fep0f,  0x1.3dea64p0f,
                    0x1.4bfdaep0f, 0x1.5ab07ep0f, 0x1.6a09e6p0f, 0x1.7a1148p0f, 0x1.8ace54p0f, 0x1.9c4918p0f,
                    0x1.ae89fap0f, 0x1.c199bep0f, 0x1.d5818ep0f, 0x1.ea4afap0f};
}
ALLFINITE_INLINE Vec<float> root_at(Vec<float> shifted, Vec<float> roots) {
  return _mm512_permutexvar_ps((__m512i)shifted, roots);
}
// root * exp(r) for |r| <= ln 2 / 32; the polynomial is minimax in the relative error of exp, 1.6e-9.
ALLFINITE_INLINE Vec<float> times_exp(Vec<float> root, Vec<float> r) {
  const Vec<float> p = fma(fma(r, splat(0x1.555748p-3f), splat(0x1.00022p-1f)), r, splat(1.0f));
  return fma(root * r, p, root);
}
#endif

// The unit of a row's exponentials: 2^-power exp(x), 0 where that is below 2^-126. |power| <= 384.
struct ExpUnit {
  float power = 0;
  float lowest = -87.33654f;  // (power - 126) ln 2
};
ALLFINITE_INLINE ExpUnit exp_unit(double power) {
  return {static_cast<float>(power), static_cast<float>((power - 126) * kLn2)};
}

// 2^-power exp(x); exp(0) is exactly 1 for a power of 0. The result must not overflow: x <= 88 for a power of 0.
//
// x = n ln 2 + r with n a multiple of 1 / 16 (or 1); exp(r) is a polynomial, minimax in the relative error of exp. n ln
// 2 is subtracted in two parts, whose first has 15 bits, so that r is exact but for its own rounding.
ALLFINITE_INLINE Vec<float> exp(Vec<float> x, ExpUnit unit = {}) {
  constexpr float kLog2E = 0x1.715476p0f, kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  const Vec<float> lowest = splat(unit.lowest);
  const Vec<float> clamped = max(lowest, x);
#if defined(__AVX512F__)
  // 13 instructions.
  const Vec<float> shifted = fma(clamped, splat(kLog2E), splat(kRoundToSixteenths));
  const Vec<float> n = shifted - kRoundToSixteenths;
  const Vec<float> r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), clamped));
  const __mmask16 normal = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, times_exp(root_at(shifted, roots_of_two()), r), n - unit.power);
#else
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which is left in the low bits
  const Vec<float> shifted = fma(clamped, splat(kLog2E), splat(kRound));
  const Vec<float> n = shifted - kRound;
  const Vec<float> r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), clamped));
  Vec<float> p = splat(0x1.6a1a72p-10f);  // 3.3e-9
  p = fma(p, r, splat(0x1.123fc6p-7f));
  p = fma(p, r, splat(0x1.555916p-5f));
  p = fma(p, r, splat(0x1.55548ap-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^(n - power) as a factor, so that a NaN in p survives whatever its n is.
  const uint32_t bias = 127u - 0x4b400000u - static_cast<uint32_t>(static_cast<int32_t>(unit.power));
  const Vec<float> factor = (Vec<float>)(((Vec<uint32_t>)shifted + bias) << 23);
  return x < lowest ? Vec<float>{} : p * factor;
#endif
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
