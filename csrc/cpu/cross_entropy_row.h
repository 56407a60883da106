// What forward and backward of cross entropy do to one row in the same way: exp(x - from), and the mass that the
// target puts on each class.
#pragma once
#include "cpu/cross_entropy.h"
#include "cpu/math.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// The exponentials of a row, exp(x - from) for x - from <= 88; 0 below 2^-126 and for x = -inf, NaN where x is.
//
// RowExp<float>: `from` is a whole multiple of ln 2, so that x itself is reduced and no difference is rounded, which at
// 64 to 88 would be 2^-18 of the result.
template <class A>
class RowExp {
 public:
  explicit RowExp(double reference) : power_(__builtin_floor(reference / kLn2)), unit_(exp_unit(power_)) {}

  ALLFINITE_INLINE Vec<A> operator()(Vec<A> x) const { return exp(x, unit_); }
  double from() const { return power_ * kLn2; }

 private:
  double power_;
  ExpUnit unit_;
};
template <>
class RowExp<double> {
 public:
  explicit RowExp(double reference) : from_(reference) {}

  ALLFINITE_INLINE Vec<double> operator()(Vec<double> x) const { return exp(x - from_); }
  double from() const { return from_; }

 private:
  double from_;
};

// The same in fp32 for a reference of any magnitude: what the rounding of x - from took (exact: two-sum, Knuth 1969) is
// put back as a factor 1 + part.
class FarRowExp {
 public:
  explicit FarRowExp(double reference) : from_(static_cast<float>(reference)) {}

  ALLFINITE_INLINE Vec<float> operator()(Vec<float> x) const {
    const Vec<float> d = x - from_;
    const Vec<float> minus_from = d - x;
    const Vec<float> part = (x - (d - minus_from)) - (minus_from + from_);
    const Vec<float> e = exp(d);
    return d < ExpUnit{}.lowest ? Vec<float>{} : fma(e, part, e);
  }
  double from() const { return static_cast<double>(from_); }

 private:
  float from_;
};

// f(exponential): the one for arithmetic A whose `from` is the reference, or less than 0.7 below it.
template <class A, class F>
auto with_row_exp(double reference, const F& f) {
  constexpr double kFarthest = 256;  // 370 ln 2
  if constexpr (std::is_same_v<A, float>) {
    if (!(__builtin_fabs(reference) <= kFarthest)) {
      return f(FarRowExp(reference));
    }
  }
  return f(RowExp<A>(reference));
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
