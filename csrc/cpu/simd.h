// Vectors of float and double for the CPU kernels, in the width of the instruction set that a file is
// compiled for (16, 8 or 4 floats), with loads and stores that widen and round every storage type.
//
// Built on the compiler's vector types: + - * / and comparisons are the operators, `mask ? a : b` selects.
// Products are never fused by the compiler (-ffp-contract=off); write fma(a, b, c) where one rounding is
// wanted (two on a baseline x86, which has no such instruction). Rounding to 16 bits is to nearest even,
// keeps subnormals, turns overflow into infinity and keeps NaN.
//
// Everything lives in an unnamed namespace of the instruction set's own: nothing here may become a weak
// symbol.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/convert.h"
#include "cpu/dtype.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct VecType;
template <>
struct VecType<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecType<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecType<int32_t> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecType<uint32_t> {
  typedef uint32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecType<int64_t> {
  typedef int64_t type __attribute__((vector_size(kVectorBytes)));
};

// Vec<float>, Vec<double>: one register. kWidth<T>: its number of elements.
template <class T>
using Vec = typename VecType<T>::type;
template <class T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

using HalfWords = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using FloatsForDoubles = float __attribute__((vector_size(kVectorBytes / 2)));

template <class T>
ALLFINITE_INLINE Vec<T> splat(T value) {
  return value - Vec<T>{};  // the compiler broadcasts a scalar operand; x - 0 keeps -0, infinities and NaN
}

// Whether fma(a, b, c) rounds once, and a * b may leave the range on the way.
#if defined(__AVX512F__) || defined(__AVX2__)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;
#endif
ALLFINITE_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
ALLFINITE_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

ALLFINITE_INLINE Vec<float> abs(Vec<float> v) {
  return (Vec<float>)((Vec<uint32_t>)v & 0x7fffffffu);
}
ALLFINITE_INLINE Vec<double> abs(Vec<double> v) {
  return (Vec<double>)((Vec<int64_t>)v & 0x7fffffffffffffff);
}

// The larger of each pair; where one of the two is NaN, b.
template <class V>
ALLFINITE_INLINE V max(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) {
    return _mm512_max_ps(a, b);
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vec<float>>) {
    return _mm256_max_ps(a, b);
  }
#endif
  return a > b ? a : b;
}

// The lower or the upper half of a vector of any width.
template <class T, int kLanes>
struct Part {
  typedef T type __attribute__((vector_size(kLanes * static_cast<int>(sizeof(T)))));
};
template <int kFirst, class V, int... kIndex>
ALLFINITE_INLINE auto lanes_from(V v, std::integer_sequence<int, kIndex...>) {
  return __builtin_shufflevector(v, v, (kFirst + kIndex)...);
}

// join(join(lower half, upper half)) ... down to one lane, always in the same order.
template <class T, int kLanes, class V, class Join>
ALLFINITE_INLINE T fold_lanes(V v, Join join) {
  if constexpr (kLanes == 2) {
    return join(v[0], v[1]);
  } else {
    constexpr int half = kLanes / 2;
    using Indices = std::make_integer_sequence<int, half>;
    const typename Part<T, half>::type low = lanes_from<0>(v, Indices{}), high = lanes_from<half>(v, Indices{});
    return fold_lanes<T, half>(join(low, high), join);
  }
}
template <class T>
ALLFINITE_INLINE T sum_lanes(Vec<T> v) {
  return fold_lanes<T, kWidth<T>>(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
template <class T>
ALLFINITE_INLINE T max_lanes(Vec<T> v) {
  return fold_lanes<T, kWidth<T>>(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

#if defined(__AVX512F__)
// The first n of `width` lanes, as a mask.
ALLFINITE_INLINE uint32_t lane_mask(int64_t n, int width) {
  return n >= width ? (1u << width) - 1 : (1u << n) - 1;
}
#endif

// The first n lanes of v, and 0 in the others, whatever they hold.
template <class V>
ALLFINITE_INLINE V first_lanes(V v, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) {
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(lane_mask(n, 16)), v);
  } else {
    return _mm512_maskz_mov_pd(static_cast<__mmask8>(lane_mask(n, 8)), v);
  }
#else
  V kept = {};
  for (int64_t i = 0; i < n; ++i) {
    kept[i] = v[i];
  }
  return kept;
#endif
}

// The lanes [first, last) of v, and `other` in those outside.
template <class A>
ALLFINITE_INLINE Vec<A> lanes_within(Vec<A> v, int64_t first, int64_t last, A other) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    const uint32_t below = first <= 0 ? 0 : lane_mask(first, 16), inside = last <= 0 ? 0 : lane_mask(last, 16);
    return _mm512_mask_mov_ps(splat(other), static_cast<__mmask16>(inside & ~below), v);
  }
#endif
  for (int64_t i = 0; i < kWidth<A>; ++i) {
    v[i] = i >= first && i < last ? v[i] : other;
  }
  return v;
}

ALLFINITE_INLINE Vec<double> to_doubles(FloatsForDoubles v) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd((__m256)v);  // g++ makes two halves of the general form
#else
  return __builtin_convertvector(v, Vec<double>);
#endif
}

// --- vector loads and stores ---------------------------------------------------------------------------------------

ALLFINITE_INLINE Vec<float> load_vector(const float* p, float) {
  Vec<float> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
ALLFINITE_INLINE Vec<double> load_vector(const double* p, double) {
  Vec<double> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
ALLFINITE_INLINE Vec<double> load_vector(const float* p, double) {
  FloatsForDoubles v;
  std::memcpy(&v, p, sizeof v);
  return to_doubles(v);
}
ALLFINITE_INLINE Vec<float> load_vector(const BFloat16* p, float) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
                                       16);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  HalfWords words;
  std::memcpy(&words, p, sizeof words);
  return (Vec<float>)(__builtin_convertvector(words, Vec<uint32_t>) << 16);
#endif
}
ALLFINITE_INLINE Vec<float> load_vector(const Half* p, float) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> v;
  for (int i = 0; i < kWidth<float>; ++i) {
    v[i] = half_to_float(p[i].bits);
  }
  return v;
#endif
}
template <class T>
ALLFINITE_INLINE Vec<double> load_vector(const T* p, double) {
  Vec<double> v;
  for (int i = 0; i < kWidth<double>; ++i) {
    v[i] = widen<double>(p[i]);
  }
  return v;
}

// packed(v, T{}): v rounded to T, as its elements lie in memory.
ALLFINITE_INLINE Vec<float> packed(Vec<float> v, float) {
  return v;
}
ALLFINITE_INLINE Vec<double> packed(Vec<double> v, double) {
  return v;
}
ALLFINITE_INLINE HalfWords packed(Vec<float> v, BFloat16) {
#if defined(__AVX512F__)  // with masks: 5 instructions instead of 9
  const __m512i bits = _mm512_castps_si512(v);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, bits, _mm512_set1_epi32(0x8000));
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return (HalfWords)_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#else
  const Vec<uint32_t> bits = (Vec<uint32_t>)v;
  const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vec<uint32_t> result = v != v ? bits >> 16 | 0x40u : rounded;
#if defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)result, (__m256i)result), 0xd8);
  return (HalfWords)_mm256_castsi256_si128(words);
#else
  return __builtin_convertvector(result, HalfWords);
#endif
#endif
}
ALLFINITE_INLINE HalfWords packed(Vec<float> v, Half) {
#if defined(__AVX512F__)
  return (HalfWords)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (HalfWords)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  HalfWords words;
  for (int i = 0; i < kWidth<float>; ++i) {
    words[i] = float_to_half(v[i]);
  }
  return words;
#endif
}

template <class T>
ALLFINITE_INLINE void store_vector(T* p, Vec<float> v) {
  const auto words = packed(v, T{});
  std::memcpy(p, &words, sizeof words);
}
ALLFINITE_INLINE void store_vector(double* p, Vec<double> v) {
  std::memcpy(p, &v, sizeof v);
}
template <class T>
ALLFINITE_INLINE void store_vector(T* p, Vec<double> v) {
  for (int i = 0; i < kWidth<double>; ++i) {
    p[i] = narrow<T>(static_cast<double>(v[i]));
  }
}

// load<A>(p): kWidth<A> elements of any storage type as Vec<A>. The _partial forms read or write the first n
// only (0 <= n <= width); lanes that are not read are 0.
template <class A, class T>
ALLFINITE_INLINE Vec<A> load(const T* p) {
  return load_vector(p, A{});
}
template <class A, class T>
ALLFINITE_INLINE Vec<A> load_partial(const T* p, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, T>) {
    if constexpr (std::is_same_v<A, float>) {
      return _mm512_maskz_loadu_ps(static_cast<__mmask16>(lane_mask(n, 16)), p);
    } else {
      return _mm512_maskz_loadu_pd(static_cast<__mmask8>(lane_mask(n, 8)), p);
    }
  }
  if constexpr (std::is_same_v<A, float> && sizeof(T) == 2) {
    const __m256i words = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(lane_mask(n, 16)), p);
    return std::is_same_v<T, Half> ? _mm512_cvtph_ps(words)
                                   : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
#endif
  T lanes[kWidth<A>] = {};
  for (int64_t i = 0; i < n; ++i) {
    lanes[i] = p[i];
  }
  return load<A>(lanes);
}
template <class T, class V>
ALLFINITE_INLINE void store(T* p, V v) {
  store_vector(p, v);
}
// The store of what is not read again soon: it goes past the caches, so that the line is not read first. p must be a
// multiple of the stored vector's size. finish_streaming() before another thread may read.
template <class T, class V>
ALLFINITE_INLINE void store_streaming(T* p, V v) {
#if defined(__x86_64__)
  const auto words = packed(v, T{});
  if constexpr (sizeof words == 8) {
    long long word;
    std::memcpy(&word, &words, sizeof word);
    _mm_stream_si64(reinterpret_cast<long long*>(p), word);
  } else if constexpr (sizeof words == 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)words);
  } else {
#if defined(__AVX2__)
    if constexpr (sizeof words == 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)words);
    }
#endif
#if defined(__AVX512F__)
    if constexpr (sizeof words == 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)words);
    }
#endif
  }
#else
  store(p, v);
#endif
}
ALLFINITE_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T, class V>
ALLFINITE_INLINE void store_partial(T* p, V v, int64_t n) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>> && std::is_same_v<T, float>) {
    return _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lane_mask(n, 16)), v);
  } else if constexpr (std::is_same_v<V, Vec<double>> && std::is_same_v<T, double>) {
    return _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lane_mask(n, 8)), v);
  }
#endif
  T lanes[sizeof(V) / sizeof(v[0])];
  store(lanes, v);
  for (int64_t i = 0; i < n; ++i) {
    p[i] = lanes[i];
  }
}

// The first `count` elements, all of them as a whole vector.
template <class A, class T>
ALLFINITE_INLINE Vec<A> load_some(const T* p, int64_t count) {
  return count == kWidth<A> ? load<A>(p) : load_partial<A>(p, count);
}
template <class T, class V>
ALLFINITE_INLINE void store_some(T* p, V v, int64_t count) {
  if (count == static_cast<int64_t>(sizeof(V) / sizeof(v[0]))) {
    store(p, v);
  } else {
    store_partial(p, v, count);
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
