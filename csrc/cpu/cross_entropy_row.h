// What forward and backward of cross entropy do to one row in the same way: exp(x - shift), and the mass that the
// target puts on each class.
#pragma once
#include "cpu/cross_entropy.h"
#include "cpu/math.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// exp(x - shift) for x - shift <= 88; 0 below 2^-126 and for x = -inf; NaN where x or the difference is.
//
// The difference is rounded to fp32, which at 64 to 88 is 2^-18 of the result. With kExact the part that the rounding
// took (exact: two-sum, Knuth 1969) is put back as a factor 1 + part.
template <bool kExact>
ALLFINITE_INLINE Vec<float> exp_difference(Vec<float> x, float shift) {
  if constexpr (!kExact) {
    return exp(x - shift);
  }
  constexpr float kLowest = -87.33654f;  // ln 2^-126, as in exp
  const Vec<float> d = x - shift;
  const Vec<float> minus_shift = d - x;
  const Vec<float> part = (x - (d - minus_shift)) - (minus_shift + shift);
  const Vec<float> e = exp(d);
  return d < kLowest ? Vec<float>{} : fma(e, part, e);
}
template <bool kExact>
ALLFINITE_INLINE Vec<double> exp_difference(Vec<double> x, double shift) {
  return exp(x - shift);
}

// The mass q of each class, with which a row's loss is the sum of q * -log p; A vector at a time.
// Index targets: what label smoothing spreads over all classes.
template <class A, class W>
struct SmoothedMass {
  const W* weight;  // null: 1
  A share;          // smoothing / n

  ALLFINITE_INLINE Vec<A> operator()(int64_t i, int64_t count) const {
    return weight ? load_some<A>(weight + i, count) * share : splat(share);
  }
};
template <class A, class W, class P>
struct ProbabilityMass {
  const P* probability;
  const W* weight;
  A kept, share;  // 1 - smoothing, smoothing / n

  ALLFINITE_INLINE Vec<A> operator()(int64_t i, int64_t count) const {
    const Vec<A> q = fma(load_some<A>(probability + i, count), splat(kept), splat(share));
    return weight ? load_some<A>(weight + i, count) * q : q;
  }
};

template <class A, class W>
SmoothedMass<A, W> smoothed_mass(const CrossEntropyRows& r) {
  return {static_cast<const W*>(r.weight), static_cast<A>(r.smoothing / static_cast<double>(r.n))};
}
template <class A, class W, class P>
ProbabilityMass<A, W, P> probability_mass(const CrossEntropyRows& r, int64_t row) {
  return {static_cast<const P*>(r.probability) + row * r.probability_stride, static_cast<const W*>(r.weight),
          static_cast<A>(1 - r.smoothing), static_cast<A>(r.smoothing / static_cast<double>(r.n))};
}

template <class W>
double class_weight(const CrossEntropyRows& r, int64_t target) {
  return r.weight ? static_cast<double>(static_cast<const W*>(r.weight)[target]) : 1.0;
}

// f(Tag<T>, Tag<P>): logits T, class probabilities P.
template <class F>
void visit_cross_entropy(const CrossEntropyRows& r, F&& f) {
  visit_with_weight(r.dtype, r.probability_dtype, f);
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
