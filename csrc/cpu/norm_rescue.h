// Backward of rows whose products or results leave the range of the compute type on the way: mantissas are multiplied
// as in the plain path of norm_backward.cpp, exponents are added up apart, and all powers of two are taken back in the
// one rounding. So the result stays linear in dy bit for bit (F4).
#pragma once
#include "cpu/norm_row.h"
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// a * b * 2^-exponent, without leaving the range on the way.
template <class A>
A scaled_product(A a, A b, int exponent) {
  int of_a = 0, of_b = 0;
  const double factor = __builtin_frexp(static_cast<double>(a), &of_a);
  const A product = static_cast<A>(factor * __builtin_frexp(static_cast<double>(b), &of_b));
  return static_cast<A>(__builtin_ldexp(static_cast<double>(product), of_a + of_b - exponent));
}

// a * 2^exponent + b with the one rounding of a sum in A, whatever the exponents.
template <class A>
double scaled_sum(A a, int exponent, A b) {
  if (b == 0 || a == 0 || !__builtin_isfinite(a) || !__builtin_isfinite(b)) {
    return __builtin_ldexp(static_cast<double>(a), exponent) + static_cast<double>(b);
  }
  int of_a = 0, of_b = 0;
  const double fraction_a = __builtin_frexp(static_cast<double>(a), &of_a);
  const double fraction_b = __builtin_frexp(static_cast<double>(b), &of_b);
  of_a += exponent;
  const int common = of_a > of_b ? of_a : of_b;
  const A sum = static_cast<A>(__builtin_ldexp(fraction_a, of_a - common)) +
                static_cast<A>(__builtin_ldexp(fraction_b, of_b - common));
  return __builtin_ldexp(static_cast<double>(sum), common);
}

template <class A>
bool all_zero(const A* p, int64_t n) {
  Vec<A> nonzero = {};
  for_each_vector<A>(n, [&](int64_t i, int64_t count) { nonzero = max(nonzero, abs(load_some<A>(p + i, count))); });
  return max_lanes<A>(nonzero) == 0;
}

// The exponent e for which the largest |dy * weight| * 2^-e is near 1; false where no product is finite and not 0.
template <class A>
bool rescue_exponent(const A* dy, const A* weight, int64_t n, int& exponent) {
  if (all_zero(dy, n) || all_zero(weight, n)) {
    return false;  // rows of padding and of masked losses: often, so quickly
  }
  bool found = false;
  for (int64_t i = 0; i < n; ++i) {
    if (dy[i] != 0 && weight[i] != 0 && __builtin_isfinite(dy[i]) && __builtin_isfinite(weight[i])) {
      int of_dy = 0, of_weight = 0;
      __builtin_frexp(static_cast<double>(dy[i]), &of_dy);
      __builtin_frexp(static_cast<double>(weight[i]), &of_weight);
      exponent = found && exponent > of_dy + of_weight ? exponent : of_dy + of_weight;
      found = true;
    }
  }
  return found;
}

// g[i] = dy[i] * weight[i] * 2^-exponent.
template <class A>
void scaled_products(const A* dy, const A* weight, int64_t n, int exponent, A* g) {
  for (int64_t i = 0; i < n; ++i) {
    g[i] = scaled_product(dy[i], weight[i], exponent);
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
