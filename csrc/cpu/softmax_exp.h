// The exponentials of softmax: of numbers that are not above 0, or hardly, because the largest score is subtracted.
#pragma once
#include "cpu/math.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Weights are kept times 2^kLift<T>, and those below 2^kLowestPower<T> are 0: bf16 has subnormal numbers that fp32
// itself would have only as such.
template <class T>
constexpr int kLift = std::is_same_v<T, BFloat16> ? 16 : 0;
template <class T>
constexpr float kLowestPower = std::is_same_v<T, BFloat16> ? -135 : -126;

#if defined(__AVX512F__)
// 2^(k / 16) * 2^kLift<T>.
template <class T>
ALLFINITE_INLINE Vec<float> lifted_root_at(Vec<float> shifted) {
  constexpr float kOne = kLift<T> ? 65536.0f : 1.0f;
  return root_at(shifted, roots_of_two() * kOne);
}
#endif

// exp(x + low) * 2^kLift<T> for x <= 0 and a low of less than an ulp of x: 3e-7 off at most, 0 below 2^kLowestPower<T>.
// exp(0) is exactly 1. NaN stays NaN.
template <class T>
ALLFINITE_INLINE Vec<float> exp_below_zero(Vec<float> x, Vec<float> low) {
  constexpr float kLowest = kLowestPower<T> * 0x1.62e43p-1f;
#if defined(__AVX512F__)
  const Vec<float> shifted = fma(x, splat(0x1.715476p0f), splat(kRoundToSixteenths));
  const Vec<float> n = shifted - kRoundToSixteenths;
  const Vec<float> r = fma(n, splat(-0x1.62e43p-1f), x) + low;  // ln 2 is off by 2e-9, times n of 135 at most
  const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(kLowest), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, times_exp(lifted_root_at<T>(shifted), r), n);
#else
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which is left in the low bits
  const Vec<float> shifted = fma(x, splat(0x1.715476p0f), splat(kRound));
  const Vec<float> n = shifted - kRound;
  Vec<float> r;
  if constexpr (kFusedMultiplyAdd) {
    r = fma(n, splat(-0x1.62e43p-1f), x);  // ln 2 is off by 2e-9, times n of 135 at most
  } else {
    r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // the first product is exact
  }
  r += low;
  // (exp(r) - 1 - r) / r^2: minimax of the relative error of exp, 1.1e-7.
  Vec<float> p = splat(0x1.106256p-7f);
  p = fma(p, r, splat(0x1.572a64p-5f));
  p = fma(p, r, splat(0x1.5557b0p-3f));
  p = fma(p, r, splat(0x1.fffdfcp-2f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n as a factor, so that a NaN in p survives whatever its bits are.
  const Vec<float> power = (Vec<float>)(((Vec<uint32_t>)shifted + (127u + kLift<T> - 0x4b400000u)) << 23);
  return x < kLowest ? Vec<float>{} : p * power;
#endif
}
template <class T>
ALLFINITE_INLINE Vec<double> exp_below_zero(Vec<double> x, Vec<double> low) {
  return exp(x + low);
}

// 2^x * 2^kLift<T> for x <= 0, in fewer steps: 6e-7 off at most where x is exact. For weights of 16-bit rows.
template <class T>
ALLFINITE_INLINE Vec<float> exp2_below_zero(Vec<float> x) {
#if defined(__AVX512F__)
  const Vec<float> shifted = x + kRoundToSixteenths;
  const Vec<float> n = shifted - kRoundToSixteenths;
  const Vec<float> f = x - n;
  const Vec<float> root = lifted_root_at<T>(shifted);
  // (2^f - 1) / f: minimax of the relative error of 2^f, 4.3e-07.
  const Vec<float> p = fma(f, splat(0x1.ebfbdap-3f), splat(0x1.62e98p-1f));
  const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(kLowestPower<T>), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, fma(root * f, p, root), n);
#else
  // n goes into the exponent by an addition of integers, which a NaN survives because its low 9 bits are 0 there.
  constexpr float kRound = 0x1.8p23f + kLift<T>;
  const Vec<float> shifted = x + kRound;
  const Vec<float> f = x - (shifted - kRound);
  // (2^f - 1) / f: minimax of the relative error of 2^f, 1.1e-7.
  Vec<float> p = splat(0x1.5bb9e6p-10f);
  p = fma(p, f, splat(0x1.3ceab6p-7f));
  p = fma(p, f, splat(0x1.c6b754p-5f));
  p = fma(p, f, splat(0x1.ebf9bcp-3f));
  p = fma(p, f, splat(0x1.62e42ap-1f));
  p = fma(p, f, splat(1.0f));
  const Vec<float> result = (Vec<float>)((Vec<uint32_t>)p + ((Vec<uint32_t>)shifted << 23));
  return x < kLowestPower<T> ? Vec<float>{} : result;
#endif
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
