// Sum of squares, largest magnitude, zeros and subnormals of gradients.
//
// Bytes: each number read once, b per element, nothing written. Floor: read bandwidth.
//
// Squares are added in double whatever the dtype: those of fp16, bf16 and fp32 neither overflow nor underflow there,
// and are exact. Those of fp64 may leave its range: the caller sees that from the largest magnitude and comes again
// with a scale. NaN and infinity take part as the arithmetic has it: a NaN makes sum and magnitude NaN, infinity
// without NaN makes both infinite. A subnormal is a value below the smallest normal number of its own dtype, not 0.
#include "cpu/grad_stats.h"

#include "cpu/grad_sums.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// The bits of the smallest normal number of T.
template <class T>
constexpr Bits<Accumulate<T>> kNormal = __builtin_bit_cast(int32_t, 0x1p-126f);
template <>
constexpr int32_t kNormal<Half> = __builtin_bit_cast(int32_t, 0x1p-14f);
template <>
constexpr int64_t kNormal<double> = __builtin_bit_cast(int64_t, 0x1p-1022);

template <class T>
void one_by_one(const T* x, int64_t n, int64_t stride, double scale, GradSums& sums) {
  using A = Accumulate<T>;
  Bits<A> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A v = widen<A>(x[i * stride]);
    const Bits<A> magnitude = __builtin_bit_cast(Bits<A>, v) & kMagnitude<A>;
    const double scaled = static_cast<double>(v) * scale;
    sums.squares += scaled * scaled;
    sums.zeros += magnitude == 0;
    sums.subnormals += magnitude != 0 && magnitude < kNormal<T>;
    largest = magnitude > largest ? magnitude : largest;
  }
  take_magnitude<A>(sums.magnitude, largest);
}

template <class B>
ALLFINITE_INLINE int64_t count_lanes(Vec<B> v) {
  int64_t total = 0;
  for (int i = 0; i < kWidth<B>; ++i) {
    total += v[i];
  }
  return total;
}

// The caller's chunks are short enough for 32-bit counters. Returns how many numbers were done.
template <class T>
int64_t vectors(const T* x, int64_t n, GradSums& sums) {
  using A = Accumulate<T>;
  using B = Bits<A>;
  constexpr int w = kWidth<A>, kUnroll = 4;
  Vec<double> squares[2 * kUnroll] = {};
  Vec<B> largest = {}, zeros = {}, below_normal = {};
  int64_t i = 0;
  for (; i + kUnroll * w <= n; i += kUnroll * w) {
    for (int u = 0; u < kUnroll; ++u) {
      const Vec<A> v = load<A>(x + i + u * w);
      const Vec<B> magnitude = (Vec<B>)v & kMagnitude<A>;
      largest = max(magnitude, largest);
      zeros -= magnitude == 0;  // a true comparison is -1
      below_normal -= magnitude < kNormal<T>;
      add_squares(squares + 2 * u, v);
    }
  }
  Vec<double> total = {};
  for (const Vec<double>& s : squares) {
    total += s;
  }
  sums.squares += sum_lanes<double>(total);
  const int64_t zero_count = count_lanes<B>(zeros);
  sums.zeros += zero_count;
  sums.subnormals += count_lanes<B>(below_normal) - zero_count;
  take_magnitude<A>(sums.magnitude, max_lanes<B>(largest));
  return i;
}

}  // namespace

void grad_stats(const GradStatsArgs& args) {
  visit_dtype(args.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const T* x = static_cast<const T*>(args.data);
    const bool plain = args.stride == 1 && args.scale == 1;
    const int64_t done = plain ? vectors(x, args.count, *args.sums) : 0;
    one_by_one(x + done, args.count - done, args.stride, args.scale, *args.sums);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
