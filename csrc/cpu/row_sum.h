// Sums over a row whose error depends neither on its length nor on its values.
//
// A long fp32 sum of like terms rounds the same way at every step and drifts by 2^-25 of itself an addition. So fp32
// vectors are added in chains of kChain at most, and the chains in double; a sum that later results cancel against
// (a mean) is added in double from the start. Order: fixed by n and the instruction set alone (F5).
#pragma once
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kChain = 8;

// Adds vectors of A lane by lane in double.
template <class A>
class WideSum {
 public:
  ALLFINITE_INLINE void add(Vec<A> v) {
    if constexpr (std::is_same_v<A, double>) {
      low_ += v;
    } else {
#if defined(__AVX512F__)
      low_ += (Vec<double>)_mm512_cvtps_pd(_mm512_castps512_ps256(v));
      high_ += (Vec<double>)_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
      low_ += (Vec<double>)_mm256_cvtps_pd(_mm256_castps256_ps128(v));
      high_ += (Vec<double>)_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
      FloatsForDoubles halves[2];
      std::memcpy(halves, &v, sizeof v);
      low_ += __builtin_convertvector(halves[0], Vec<double>);
      high_ += __builtin_convertvector(halves[1], Vec<double>);
#endif
    }
  }
  // The vector at p, from memory: fewer instructions than from a register.
  ALLFINITE_INLINE void add(const A* p) {
#if defined(__AVX512F__) || defined(__AVX2__)
    if constexpr (std::is_same_v<A, float>) {
      low_ += load<double>(p);
      high_ += load<double>(p + kWidth<double>);
      return;
    }
#endif
    add(load<A>(p));
  }
  ALLFINITE_INLINE void add(const WideSum& other) {
    low_ += other.low_;
    high_ += other.high_;
  }
  ALLFINITE_INLINE double total() const { return sum_lanes<double>(low_ + high_); }

 private:
  Vec<double> low_ = {}, high_ = {};
};

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
