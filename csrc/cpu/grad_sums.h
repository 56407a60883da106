// What the reading passes over gradients share: the bits of a magnitude, and squares added in double.
#pragma once
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
using Bits = std::conditional_t<std::is_same_v<A, float>, int32_t, int64_t>;

template <class A>
constexpr Bits<A> kMagnitude = std::numeric_limits<Bits<A>>::max();  // all but the sign

// The larger of `largest` and `magnitude`, both as bits: those of a double, and those of A.
template <class A>
ALLFINITE_INLINE void take_magnitude(int64_t& largest, Bits<A> magnitude) {
  const double value = static_cast<double>(__builtin_bit_cast(A, magnitude));
  const int64_t bits = __builtin_bit_cast(int64_t, value);
  largest = bits > largest ? bits : largest;
}

// Adds the squares of a vector's lanes to two accumulators.
ALLFINITE_INLINE void add_squares(Vec<double>* squares, Vec<double> v) {
  squares[0] = fma(v, v, squares[0]);
}
ALLFINITE_INLINE void add_squares(Vec<double>* squares, Vec<float> v) {
  FloatsForDoubles halves[2];
  std::memcpy(halves, &v, sizeof v);
  add_squares(squares, to_doubles(halves[0]));
  add_squares(squares + 1, to_doubles(halves[1]));
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
