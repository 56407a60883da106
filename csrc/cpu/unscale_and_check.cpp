// x = x * inv_scale in place, and whether any result is infinite or NaN.
//
// Bytes: each number read and written once, 2 b per element; with inv_scale == 1 nothing is written (b per element,
// and not even the payload of a NaN changes). Floor: copy bandwidth.
//
// The product is taken in fp32 (fp64 for fp64, and where inv_scale is below fp32's normal range) and rounded once to
// the storage type. The check is on the rounded result: x that is not finite stays so under any factor (inf * 0 is
// NaN), so one test sees incoming and outgoing values. It is an integer maximum of the magnitudes' bits, in which NaN
// is larger than infinity.
#include "cpu/unscale_and_check.h"

#include "cpu/grad_sums.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// The bits of the smallest magnitude that T rounds to infinity (a tie, which goes to the even neighbour).
template <class T>
constexpr Bits<Accumulate<T>> kInfinity = __builtin_bit_cast(int32_t, __builtin_inff());
template <>
constexpr int32_t kInfinity<Half> = __builtin_bit_cast(int32_t, 65520.0f);
template <>
constexpr int32_t kInfinity<BFloat16> = __builtin_bit_cast(int32_t, 0x1.ffp127f);
template <>
constexpr int64_t kInfinity<double> = __builtin_bit_cast(int64_t, __builtin_inf());

template <class T, bool kWrite>
bool contiguous(T* x, int64_t n, Accumulate<T> inv_scale) {
  using A = Accumulate<T>;
  using B = Bits<A>;
  constexpr int w = kWidth<A>;
  Vec<B> largest = {};
  const auto one = [&](Vec<A> v) {
    const Vec<A> y = kWrite ? v * inv_scale : v;
    largest = max((Vec<B>)y & kMagnitude<A>, largest);
    return y;
  };
  int64_t i = 0;
  for (; i + w <= n; i += w) {
    const Vec<A> y = one(load<A>(x + i));
    if constexpr (kWrite) {
      store(x + i, y);
    }
  }
  if (i < n) {
    const Vec<A> y = one(load_partial<A>(x + i, n - i));
    if constexpr (kWrite) {
      store_partial(x + i, y, n - i);
    }
  }
  return max_lanes<B>(largest) >= kInfinity<T>;
}

// Factor: double where the factor is below fp32's normal range.
template <class T, bool kWrite, class Factor>
bool strided(T* x, int64_t n, int64_t stride, Factor inv_scale) {
  using A = Accumulate<T>;
  Bits<A> largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const A v = widen<A>(x[i * stride]);
    const auto y = kWrite ? v * inv_scale : v;
    const Bits<A> magnitude = __builtin_bit_cast(Bits<A>, static_cast<A>(y)) & kMagnitude<A>;
    largest = magnitude > largest ? magnitude : largest;
    if constexpr (kWrite) {
      x[i * stride] = narrow<T>(y);
    }
  }
  return largest >= kInfinity<T>;
}

template <class T, bool kWrite>
bool unscale(const UnscaleArgs& a) {
  T* x = static_cast<T*>(a.data);
  if (kWrite && a.inv_scale != 0 && a.inv_scale < 0x1p-126 && a.inv_scale > -0x1p-126) {
    return strided<T, kWrite>(x, a.count, a.stride, a.inv_scale);
  }
  const auto inv_scale = static_cast<Accumulate<T>>(a.inv_scale);
  return a.stride == 1 ? contiguous<T, kWrite>(x, a.count, inv_scale)
                       : strided<T, kWrite>(x, a.count, a.stride, inv_scale);
}

}  // namespace

void unscale_and_check(const UnscaleArgs& args) {
  visit_dtype(args.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (args.inv_scale == 1 ? unscale<T, false>(args) : unscale<T, true>(args)) {
      *args.found_inf = true;
    }
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
