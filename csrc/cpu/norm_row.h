// What the forward and the backward of the norms share about one row: its statistics, xhat, and rows and parameters of
// any storage type as rows of the compute type.
#pragma once
#include "cpu/norm.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Where the rows of a call lie, by the bytes of one of its `tensors` tensors: in a core's own cache; beyond it, so that
// the next rows are fetched ahead; so far beyond it that outputs go past the caches (a line is then not read before it
// is written).
enum class Place { kCached, kFar, kStreamed };
inline Place place_of(int64_t rows, int64_t row_bytes, int tensors, const void* output,
                      const void* other_output = nullptr) {
  const bool aligned =
      (row_bytes | reinterpret_cast<intptr_t>(output) | reinterpret_cast<intptr_t>(other_output)) % kVectorBytes == 0;
  const int64_t bytes = rows * row_bytes;
  return bytes * tensors <= int64_t{2} << 20    ? Place::kCached
         : bytes >= int64_t{8} << 20 && aligned ? Place::kStreamed
                                                : Place::kFar;
}

// Of the row times `scale`, a power of two; rstd times 2^exponent. rms_norm: both means are 0. An exponent is needed
// where xhat is 0 and 1 / sqrt(eps) beyond the type: there the scale is 1, and -exponent is stored in its place.
template <class A>
struct RowStats {
  A mean_hi, mean_lo, rstd, scale;
  int exponent;
};

template <class A>
RowStats<A> read_stats(const void* stats, int64_t row, bool rms) {
  const A* s = static_cast<const A*>(stats) + row * norm_stats(rms);
  const A scale = s[rms ? 1 : 3];
  const bool apart = scale < 0;
  return {rms ? A(0) : s[0], rms ? A(0) : s[1], s[rms ? 0 : 2], apart ? A(1) : scale,
          apart ? static_cast<int>(-scale) : 0};
}

template <class A>
void write_stats(void* stats, int64_t row, bool rms, const RowStats<A>& s) {
  A* to = static_cast<A*>(stats) + row * norm_stats(rms);
  if (!rms) {
    *to++ = s.mean_hi;
    *to++ = s.mean_lo;
  }
  to[0] = s.rstd;
  to[1] = s.exponent ? static_cast<A>(-s.exponent) : s.scale;
}

// xhat = (x - mean) * rstd of x times scale (kCentred: layer_norm). x - mean_hi is exact or nearly so where x is close
// to the mean, and then only one more rounding follows. In double, where the mean of a constant row need not be a
// number of its own, both parts of the mean are subtracted first, so that such a row gives exactly 0.
template <bool kCentred, class A>
class Normalise {
 public:
  ALLFINITE_INLINE Normalise() = default;
  ALLFINITE_INLINE explicit Normalise(const RowStats<A>& s)
      : mean_(splat(s.mean_hi)),
        low_(splat(std::is_same_v<A, float> ? -s.mean_lo * s.rstd : s.mean_lo)),
        rstd_(splat(s.rstd)) {}
  ALLFINITE_INLINE Vec<A> operator()(Vec<A> x) const {
    if constexpr (!kCentred) {
      return x * rstd_;
    } else if constexpr (std::is_same_v<A, float>) {
      return fma(x - mean_, rstd_, low_);
    } else {
      return ((x - mean_) - low_) * rstd_;
    }
  }

 private:
  Vec<A> mean_, low_, rstd_;
};

template <Place kPlace, class T, class V>
ALLFINITE_INLINE void store_output(T* p, V v, int64_t count) {
  if constexpr (kPlace == Place::kStreamed) {
    store_streaming(p, v);
  } else {
    store_some(p, v, count);
  }
}

// f(i, count) for each vector of a row; count is less than the width in the last one only.
template <class A, class F>
ALLFINITE_INLINE void for_each_vector(int64_t n, F f) {
  constexpr int w = kWidth<A>;
  int64_t i = 0;
  for (; i + w <= n; i += w) {
    f(i, static_cast<int64_t>(w));
  }
  if (i < n) {
    f(i, n - i);
  }
}

// Asks for the line at p + offset, which need not exist.
template <Place kPlace, class T>
ALLFINITE_INLINE void prefetch(const T* p, int64_t offset) {
  if constexpr (kPlace != Place::kCached) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + offset * static_cast<int64_t>(sizeof(T)));
  }
}

// f with the place as a constant.
template <class F>
void visit_place(Place place, F f) {
  switch (place) {
    case Place::kCached:
      return f(std::integral_constant<Place, Place::kCached>{});
    case Place::kFar:
      return f(std::integral_constant<Place, Place::kFar>{});
    case Place::kStreamed:
      return f(std::integral_constant<Place, Place::kStreamed>{});
  }
}

// The row as A: where it is stored, or in `buffer`.
template <class A, class T>
const A* widened(const T* p, int64_t n, A* buffer) {
  if constexpr (std::is_same_v<A, T>) {
    return p;
  } else {
    for_each_vector<A>(n, [&](int64_t i, int64_t count) { store_some(buffer + i, load_some<A>(p + i, count), count); });
    return buffer;
  }
}

// A parameter as A, and `otherwise` where there is none.
template <class A>
const A* parameter(const void* p, DType dtype, int64_t n, A otherwise, A* buffer) {
  if (!p) {
    for (int64_t i = 0; i < n; ++i) {
      buffer[i] = otherwise;
    }
    return buffer;
  }
  const A* result = nullptr;
  visit_dtype(dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (std::is_same_v<Accumulate<T>, A>) {
      result = widened(static_cast<const T*>(p), n, buffer);
    }
  });
  return result;
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
