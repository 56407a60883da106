// What the attention kernels do with one row: powers of two, writing a result, the marker of a masked weight.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
A power_of_two(int exponent) {
  return static_cast<A>(__builtin_ldexp(1.0, exponent));
}

// factor * 2^exponent as a product of two numbers of A, neither of which leaves its range where the whole may.
template <class A>
struct Factor {
  Factor(double factor, int exponent) {
    int own = 0;
    const double fraction = __builtin_frexp(factor, &own);
    const int total = exponent + own;
    const bool in_range = total > std::numeric_limits<A>::min_exponent && total < std::numeric_limits<A>::max_exponent;
    const int half = in_range ? total : total / 2;
    first = static_cast<A>(__builtin_ldexp(fraction, half));
    second = static_cast<A>(__builtin_ldexp(1.0, total - half));
  }
  A first, second;
};

// A masked weight is -0, which no weight that takes part is: 0 in a sum, and known again where a NaN must stay out.
template <class A>
ALLFINITE_INLINE auto is_masked(Vec<A> weight) {
  if constexpr (std::is_same_v<A, float>) {
    return (Vec<int32_t>)weight == std::numeric_limits<int32_t>::min();
  } else {
    return (Vec<int64_t>)weight == std::numeric_limits<int64_t>::min();
  }
}
template <class A>
ALLFINITE_INLINE bool is_masked(A weight) {
  return weight == 0 && __builtin_signbit(weight);
}

// visit_dtype for the storage types that are computed in A.
template <class A, class F>
void visit_stored(DType dtype, F&& f) {
  if constexpr (std::is_same_v<A, double>) {
    f(Tag<double>{});
  } else if (dtype != DType::kFloat64) {
    visit_dtype(dtype, [&](auto t) {
      if constexpr (!std::is_same_v<typename decltype(t)::type, double>) {
        f(t);
      }
    });
  }
}

// A row of a tensor as it is stored, widened, times factor.
template <class A>
void read_row(const AttentionTensor& t, int64_t batch, int64_t head, int64_t row, int64_t n, A factor, A* out) {
  visit_stored<A>(t.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(t.data) + batch * t.batch + head * t.head + row * t.row;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = widen<A>(from[i]) * factor;
    }
  });
}

// out = row * factor * 2^exponent, rounded to A by the first product and to T once at the end: the bits of the
// significand do not depend on the exponent (F4).
template <class A, class T>
void write_row(T* out, const A* row, int64_t n, A factor, int exponent) {
  constexpr int w = kWidth<A>;
  const Factor<A> power(1.0, exponent);
  for (int64_t i = 0; i < n; i += w) {
    const Vec<A> v = load<A>(row + i) * factor * power.first * power.second;
    if (n - i < w) {
      store_partial(out + i, v, n - i);
    } else {
      store(out + i, v);
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
