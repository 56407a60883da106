// Sum of powers and largest magnitude of gradients: what a p-norm is made of.
//
// Bytes: each number read once, b per element, nothing written. Floor: read bandwidth. Orders 1, 2 and infinity run on
// vectors; another order is one pow() an element, which is rare in training and bound by that.
//
// Powers are added in double whatever the dtype: squares of fp16, bf16 and fp32 neither overflow nor underflow there,
// and are exact. What may leave its range (fp64, high orders) the caller sees from the largest magnitude, and comes
// again with a scale. NaN and infinity take part as the arithmetic has it.
#include "cpu/grad_norm.h"

#include "cpu/grad_sums.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kAhead = 2048;  // bytes; the processor's own prefetching stops at each page

enum class Order { kOne, kTwo, kInfinite, kOther };

template <class T>
void one_by_one(const T* x, int64_t n, const GradNormArgs& a) {
  using A = Accumulate<T>;
  Bits<A> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A v = widen<A>(x[i * a.stride]);
    const Bits<A> magnitude = __builtin_bit_cast(Bits<A>, v) & kMagnitude<A>;
    largest = magnitude > largest ? magnitude : largest;
    const double scaled = __builtin_fabs(static_cast<double>(v)) * a.scale;
    if (a.order == 2) {
      a.sums->powers += scaled * scaled;
    } else if (a.order == 1) {
      a.sums->powers += scaled;
    } else if (!__builtin_isinf(a.order)) {
      a.sums->powers += __builtin_pow(scaled, a.order);
    }
  }
  take_magnitude<A>(a.sums->magnitude, largest);
}

ALLFINITE_INLINE void add_magnitudes(Vec<double>* total, Vec<double> v) {
  total[0] += v;
}
ALLFINITE_INLINE void add_magnitudes(Vec<double>* total, Vec<float> v) {
  FloatsForDoubles halves[2];
  std::memcpy(halves, &v, sizeof v);
  total[0] += to_doubles(halves[0]);
  total[1] += to_doubles(halves[1]);
}

// Returns how many numbers were done.
template <Order kOrder, class T>
int64_t vectors(const T* x, int64_t n, PowerSums& sums) {
  using A = Accumulate<T>;
  using B = Bits<A>;
  constexpr int w = kWidth<A>, kUnroll = 4;
  Vec<double> powers[2 * kUnroll] = {};
  Vec<B> largest[kUnroll] = {};
  int64_t i = 0;
  for (; i + kUnroll * w <= n; i += kUnroll * w) {
    for (int u = 0; u < kUnroll; ++u) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + i + u * w) + kAhead);
      const Vec<A> v = load<A>(x + i + u * w);
      const Vec<B> magnitude = (Vec<B>)v & kMagnitude<A>;
      largest[u] = max(magnitude, largest[u]);
      if constexpr (kOrder == Order::kTwo) {
        add_squares(powers + 2 * u, v);
      } else if constexpr (kOrder == Order::kOne) {
        add_magnitudes(powers + 2 * u, (Vec<A>)magnitude);
      }
    }
  }
  Vec<double> total = {};
  for (const Vec<double>& p : powers) {
    total += p;
  }
  sums.powers += sum_lanes<double>(total);
  take_magnitude<A>(sums.magnitude, max_lanes<B>(max(max(largest[0], largest[1]), max(largest[2], largest[3]))));
  return i;
}

template <class T>
int64_t vectors(const T* x, const GradNormArgs& a) {
  if (a.stride != 1 || a.scale != 1) {
    return 0;
  }
  if (a.order == 2) {
    return vectors<Order::kTwo>(x, a.count, *a.sums);
  }
  if (a.order == 1) {
    return vectors<Order::kOne>(x, a.count, *a.sums);
  }
  return __builtin_isinf(a.order) ? vectors<Order::kInfinite>(x, a.count, *a.sums) : 0;
}

}  // namespace

void grad_norm(const GradNormArgs& args) {
  visit_dtype(args.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const T* x = static_cast<const T*>(args.data);
    const int64_t done = vectors(x, args);
    one_by_one(x + done, args.count - done, args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
