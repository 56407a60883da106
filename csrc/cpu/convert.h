// Numbers of the storage types as float and double, and back, each rounded once; and powers of two.
//
// Rounding to 16 bits is to nearest even, keeps subnormals, turns overflow into infinity and keeps NaN.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/dtype.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

#define ALLFINITE_INLINE inline __attribute__((always_inline))

ALLFINITE_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
ALLFINITE_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

ALLFINITE_INLINE float half_to_float(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // Shifted into a float's place the exponent is off by 112; the product puts that right for subnormals as
  // well.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
#endif
}

ALLFINITE_INLINE uint16_t float_to_half(float value) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = float_to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u);
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a sum with 0.5 leaves the subnormal, rounded, in the low bits
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

ALLFINITE_INLINE uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_to_bits(value);
  if (value != value) {
    return static_cast<uint16_t>(bits >> 16 | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// widen<A>(stored): the stored value as A (float or double); exact.
template <class A>
ALLFINITE_INLINE A widen(Half stored) {
  return static_cast<A>(half_to_float(stored.bits));
}
template <class A>
ALLFINITE_INLINE A widen(BFloat16 stored) {
  return static_cast<A>(bits_to_float(static_cast<uint32_t>(stored.bits) << 16));
}
template <class A>
ALLFINITE_INLINE A widen(float stored) {
  return static_cast<A>(stored);
}
template <class A>
ALLFINITE_INLINE A widen(double stored) {
  return static_cast<A>(stored);
}

// narrow<T>(value): rounded once to the storage type.
// From double to 16 bits through a float that is rounded to odd, which makes the second rounding the only
// one.
ALLFINITE_INLINE float round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value || __builtin_isinf(nearest)) {
    return nearest;
  }
  const uint32_t bits = float_to_bits(nearest);
  // The neighbour on the other side of `value`, if `nearest` is even: one of the two has an odd last bit.
  const bool away = (back < value) == (value > 0);
  return bits & 1u ? nearest : bits_to_float(away ? bits + 1 : bits - 1);
}
template <class T>
ALLFINITE_INLINE T narrow(float value) {
  if constexpr (std::is_same_v<T, Half>) {
    return Half{float_to_half(value)};
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16{float_to_bfloat16(value)};
  } else {
    return static_cast<T>(value);
  }
}
template <class T>
ALLFINITE_INLINE T narrow(double value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    return narrow<T>(round_to_odd(value));
  } else {
    return static_cast<T>(value);
  }
}

// 2^exponent by its bits where it is a normal fp32 number, as nearly always: ldexp is a call, and a row needs several.
template <class A>
ALLFINITE_INLINE A power_of_two(int exponent) {
  if (exponent > -127 && exponent < 128) {
    return static_cast<A>(bits_to_float(static_cast<uint32_t>(exponent + 127) << 23));
  }
  return static_cast<A>(__builtin_ldexp(1.0, exponent));
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
