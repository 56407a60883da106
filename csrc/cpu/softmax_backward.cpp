// Softmax backward: ds = y * (dy - sum(dy * y)), dx = scale * ds, row by row; the mask's gradient is ds, summed.
//
// Bytes: dy and y read, dx written once in memory, 3 b per element. 16-bit rows take y as it was before its rounding,
// in fp32, 2 more: y rounded would cost 2^-9 of each gradient. x and the mask are read only in rows whose dy is not
// finite, to tell masked weights from those that underflowed. Floor: copy bandwidth out of cache; in cache about 12
// vector instructions for 16 elements (AVX-512).
// Left after measurement (as in softmax.cpp): 0.37 to 0.49 ns an element; what 16-bit rows lose beside a backward that
// reads a rounded y is the memory of the fp32 weights, most where the allocator takes it fresh from the system.
//
// Accumulation: fp32 (fp64) products in chains of 8 vectors, the chains in double (row_sum.h); the mask's gradient in
// double, row after row.
//
// Range: dy is taken times a power of two that brings its largest magnitude to [1, 2), always, so that the result is
// linear in dy bit for bit (F4) and no sum leaves the range; the power goes back with the last factor. Where that
// factor nears the end of the range the last products are done in the next wider type.
//
// NaN and infinity: of a dy under a masked weight nothing is read (it counts as 0); every other one makes the row's
// gradients not finite, also where the weight underflowed to 0 (F2). Masked gradients are 0.
#include "cpu/row_sum.h"
#include "cpu/softmax_row.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 2;

// The bits of |value|; those of infinity, which NaN exceeds.
template <class T>
ALLFINITE_INLINE auto magnitude_bits(T value) {
  if constexpr (std::is_same_v<T, double>) {
    return __builtin_bit_cast(uint64_t, value) & ~(uint64_t{1} << 63);
  } else if constexpr (std::is_same_v<T, float>) {
    return __builtin_bit_cast(uint32_t, value) & 0x7fffffffu;
  } else {
    return static_cast<uint16_t>(value.bits & 0x7fffu);
  }
}

// The largest magnitude of a row; NaN if there is one.
template <class T>
ALLFINITE_INLINE T largest_magnitude(const T* p, int64_t n) {
  decltype(magnitude_bits(*p)) largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = magnitude_bits(p[i]);
    largest = largest > bits ? largest : bits;
  }
  return __builtin_bit_cast(T, largest);
}

// floor(log2 v) of v > 0, within the powers whose inverses are normal too; the lowest of them for 0 and what is
// smaller. A power of two. By their bits: the C library's functions cost as much as a short row.
template <class A>
ALLFINITE_INLINE int binary_exponent(A v) {
  constexpr int kLimit = std::numeric_limits<A>::max_exponent - 2;
  constexpr int kDigits = std::numeric_limits<A>::digits - 1;
  const int exponent = static_cast<int>(magnitude_bits(v) >> kDigits) - (kLimit + 1);
  return exponent > kLimit ? kLimit : exponent < -kLimit ? -kLimit : exponent;
}
// The sum over a row of dy * power * weights.
template <class T, class A>
ALLFINITE_INLINE double dot(const T* dy, A power, const A* weights, int64_t n) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> total;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> sum[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) {
      sum[u] = fma(load_some<A>(dy + i, count) * power, load_some<A>(weights + i, count), sum[u]);
    };
    int64_t i = start;
    for (; i + kLanes * w <= stop; i += kLanes * w) {
      for (int u = 0; u < kLanes; ++u) {
        step(u, i + u * w, w);
      }
    }
    for (; i < stop; i += w) {
      step(0, i, stop - i < w ? stop - i : w);
    }
    total.add(sum[0] + sum[1]);
  }
  return total.total();
}

// ds = (dy * power - mean) * weight * factor, with what its parts are for one row.
template <class T>
struct Gradient {
  using A = Accumulate<T>;
  using Number = typename WideScores<A>::Number;
  const T* dy;
  const A* weights;
  int64_t n;
  A power, mean;
  double factor;  // 1 / power

  ALLFINITE_INLINE Vec<A> centred(int64_t i, int64_t count) const {
    return fma(load_some<A>(dy + i, count), splat(power), splat(-mean));
  }

  void write(double scale, T* dx) const {
    constexpr int w = kWidth<A>;
    constexpr double kLargest = std::is_same_v<A, float> ? 0x1p120 : 0x1p1000;
    const Number last = static_cast<Number>(scale) * static_cast<Number>(factor);
    if (!(last < kLargest && last > -kLargest)) {
      write_wide(last, dx);
      return;
    }
    const A rounded = static_cast<A>(last);
    const auto one = [&](int64_t i, int64_t count) {
      return centred(i, count) * rounded * load_some<A>(weights + i, count);
    };
    int64_t i = 0;
    for (; i + 2 * w <= n; i += 2 * w) {
      store_two(dx + i, one(i, w), one(i + w, w));
    }
    for (; i < n; i += w) {
      const int64_t count = n - i < w ? n - i : w;
      store_some(dx + i, one(i, count), count);
    }
  }

  // The same roundings, and the power of two in the last one.
  void write_wide(Number last, T* dx) const {
    constexpr Number kEnd = std::numeric_limits<Number>::max();
    last = last > kEnd ? kEnd : last < -kEnd ? -kEnd : last;
    int exponent = 0;
    const A fraction = static_cast<A>(__builtin_frexpl(static_cast<long double>(last), &exponent));
    const Number two = static_cast<Number>(__builtin_ldexpl(1.0L, exponent - 1));
    for (int64_t i = 0; i < n; ++i) {
      const A difference = static_cast<A>(centred(i, 1)[0] * fraction);
      dx[i] = narrow<T>(static_cast<A>(static_cast<Number>(difference) * static_cast<Number>(weights[i]) * two * 2));
    }
  }

  void add_to(double* sums) const {
    for (int64_t i = 0; i < n; i += kWidth<A>) {
      const int64_t count = n - i < kWidth<A> ? n - i : kWidth<A>;
      const Vec<A> difference = centred(i, count);
      for (int64_t k = 0; k < count; ++k) {
        sums[i + k] += static_cast<double>(difference[k]) * static_cast<double>(weights[i + k]) * factor;
      }
    }
  }
};

template <class T>
class BackwardRows {
 public:
  using A = Accumulate<T>;

  explicit BackwardRows(const SoftmaxBackwardArgs& a)
      : a_(a),
        scale_(a.scale),
        mask_(a.mask, static_cast<A*>(scratch_part(a.scratch, a.n, 0)), a.n),
        clean_(static_cast<T*>(scratch_part(a.scratch, a.n, 1))) {}

  void run() {
    for (int64_t i = a_.begin; i < a_.end; ++i) {
      one(a_.order ? a_.order[i] : i);
    }
  }

 private:
  void one(int64_t r) {
    const T* dy = static_cast<const T*>(a_.dy) + r * a_.n;
    const A* weights = static_cast<const A*>(a_.weights) + r * a_.n;
    T* dx = a_.dx ? static_cast<T*>(a_.dx) + r * a_.n : nullptr;
    A largest = widen<A>(largest_magnitude(dy, a_.n));
    if (!__builtin_isfinite(largest)) {
      dy = without_masked(dy, r);
      largest = widen<A>(largest_magnitude(dy, a_.n));
    }
    const int exponent = __builtin_isfinite(largest) ? binary_exponent(largest) : 0;
    const A power = power_of_two<A>(-exponent);
    const A mean = static_cast<A>(dot(dy, power, weights, a_.n));
    const Gradient<T> gradient{dy, weights, a_.n, power, mean, power_of_two<double>(exponent)};
    if (!__builtin_isfinite(mean)) {
      write_beside_masked(gradient, r, dx);
      return;
    }
    if (dx) {
      gradient.write(a_.scale, dx);
    }
    if (a_.sums) {
      gradient.add_to(a_.sums);
    }
  }

  // NaN and infinity show in all gradients but the masked ones.
  void write_beside_masked(const Gradient<T>& g, int64_t r, T* dx) {
    const A* bias = mask_.row(r);
    for (int64_t i = 0; i < a_.n; ++i) {
      const A ds = masked(r, i, bias) ? A(0) : g.centred(i, 1)[0] * g.weights[i] * static_cast<A>(g.factor);
      if (dx) {
        dx[i] = narrow<T>(static_cast<A>(ds * static_cast<A>(scale_.wide)));
      }
      if (a_.sums) {
        a_.sums[i] += static_cast<double>(ds);
      }
    }
  }

  const T* without_masked(const T* dy, int64_t r) {
    const A* bias = mask_.row(r);
    for (int64_t i = 0; i < a_.n; ++i) {
      clean_[i] = masked(r, i, bias) ? T{} : dy[i];
    }
    return clean_;
  }

  bool masked(int64_t r, int64_t i, const A* bias) const {
    return is_masked(static_cast<const T*>(a_.x)[r * a_.n + i], bias ? bias[i] : A(0), scale_);
  }

  const SoftmaxBackwardArgs& a_;
  const Scale<A> scale_;
  MaskRows<A> mask_;
  T* clean_;
};

}  // namespace

void softmax_backward(const SoftmaxBackwardArgs& args) {
  visit_dtype(args.dtype, [&](auto tag) { BackwardRows<typename decltype(tag)::type>(args).run(); });
}

void softmax_mask_gradient(const SoftmaxMaskGradientArgs& args) {
  visit_dtype(args.dtype, [&](auto tag) {
    using M = typename decltype(tag)::type;
    M* out = static_cast<M*>(args.out);
    double whole = 0;
    for (int64_t i = 0; i < args.n; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < args.chunks; ++c) {
        sum += args.sums[c * args.n + i];
      }
      whole += sum;
      if (!args.whole) {
        out[i * args.step] = narrow<M>(sum);
      }
    }
    if (args.whole) {
      out[0] = narrow<M>(whole);
    }
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
