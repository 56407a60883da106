// The user's mask on one row of scores: a bool mask selects, an additive one is added; both masks are -inf by
// selection.
//
// Bytes: 1 (bool) or 2 to 8 (additive) a score. Rows of contiguous masks are read as vectors; others are gathered.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/row.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
struct MaskWords;
template <>
struct MaskWords<float> {
  using type = Vec<int32_t>;
  typedef uint8_t Bytes __attribute__((vector_size(kWidth<float>)));
};
template <>
struct MaskWords<double> {
  using type = Vec<int64_t>;
  typedef uint8_t Bytes __attribute__((vector_size(kWidth<double>)));
};

// scores where the vector's byte is true, -inf where it is false or not among the first n.
template <class A>
ALLFINITE_INLINE Vec<A> select_bools(const uint8_t* from, int64_t n, Vec<A> scores) {
  const Vec<A> masked = splat(-std::numeric_limits<A>::infinity());
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {  // a comparison into a mask register, 3 instructions in all
    const __m128i bytes = n >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))
                                  : _mm_maskz_loadu_epi8(static_cast<__mmask16>(lane_mask(n, 16)), from);
    return _mm512_mask_mov_ps(masked, _mm_test_epi8_mask(bytes, bytes), scores);
  }
#endif
  typename MaskWords<A>::Bytes bytes = {};
  if (n >= kWidth<A>) {
    std::memcpy(&bytes, from, sizeof bytes);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      bytes[i] = from[i];
    }
  }
  return __builtin_convertvector(bytes, typename MaskWords<A>::type) != 0 ? scores : masked;
}

// scores + bias / 4; a finite bias of any size leaves the sum finite. -inf gives -inf beside a finite score.
template <class A>
ALLFINITE_INLINE Vec<A> plus_bias(Vec<A> scores, Vec<A> bias) {
  return fma(bias, splat(A(0.25)), scores);
}

// The same beside a score that may be NaN, too: -inf masks it.
template <class A>
ALLFINITE_INLINE void add_bias(A* scores, Vec<A> bias) {
  constexpr A masked = -std::numeric_limits<A>::infinity();
  store(scores, bias == masked ? splat(masked) : plus_bias<A>(load<A>(scores), bias));
}

// Element [first key] of the mask's row.
inline int64_t mask_offset(const AttentionProblem& p, int64_t batch, int64_t head, int64_t row, int64_t first) {
  return batch * p.mask_stride[0] + head * p.mask_stride[1] + row * p.mask_stride[2] + first * p.mask_stride[3];
}

// scores[begin .. end) of one row, divided by 4, against the mask's row from key `first` on, of which n keys exist.
// buffer: kAttentionKeys.
template <class A>
void add_mask(const AttentionProblem& p, int64_t batch, int64_t head, int64_t row, int64_t first, int64_t n,
              int64_t begin, int64_t end, A* scores, A* buffer) {
  constexpr int64_t w = kWidth<A>;
  constexpr A masked = -std::numeric_limits<A>::infinity();
  const int64_t stride = p.mask_stride[3];
  const int64_t offset = mask_offset(p, batch, head, row, first);
  if (p.mask_is_bool && stride == 1) {
    const uint8_t* mask = static_cast<const uint8_t*>(p.mask) + offset;
    for (int64_t j = begin; j < end; j += w) {
      store(scores + j, select_bools<A>(mask + j, n - j, load<A>(scores + j)));
    }
    return;
  }
  if (p.mask_is_bool) {
    const uint8_t* mask = static_cast<const uint8_t*>(p.mask) + offset;
    for (int64_t j = begin; j < end; ++j) {
      scores[j] = j < n && mask[j * stride] ? scores[j] : masked;
    }
    return;
  }
  visit_dtype(p.mask_dtype, [&](auto m) {
    using M = typename decltype(m)::type;
    const M* mask = static_cast<const M*>(p.mask) + offset;
    if constexpr (!std::is_same_v<M, double> || std::is_same_v<A, double>) {
      for (int64_t j = begin; stride == 1 && j < end; j += w) {
        add_bias(scores + j, n - j >= w ? load<A>(mask + j) : load_partial<A>(mask + j, n - j));
      }
    }
    if (stride != 1) {
      for (int64_t j = begin; j < end; ++j) {
        buffer[j] = j < n ? widen<A>(mask[j * stride]) : A(0);
      }
      for (int64_t j = begin; j < end; j += w) {
        add_bias(scores + j, load<A>(buffer + j));
      }
    }
  });
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
