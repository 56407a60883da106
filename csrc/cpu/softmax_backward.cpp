// Softmax backward: ds = y * (dy - sum(dy * y)), dx = scale * ds, row by row; the mask's gradient is ds, summed.
//
// Bytes: dy and y (16 bits: x, and 16 a row) read, dx written once in memory, 3 b per element. 16-bit rows make their
// weights again from x and two numbers of the row: y rounded would cost 2^-9 of each gradient, and y in fp32 four more
// bytes an element, written and read. fp32 rows read x and the mask only where dy is not finite, to tell masked weights
// from those that underflowed. Floor: copy bandwidth out of cache; in cache about 9 vector instructions for 16 elements
// (AVX-512), and 14 more where a weight is made again.
// Left after measurement (as in softmax.cpp): short rows pay for the sum over the lanes, long ones for reading dy and y
// twice out of L2 or L3; 16-bit rows for exp, 0.17 ns an element.
//
// Accumulation: fp32 (fp64) products in chains of 8 vectors, the chains in double (row_sum.h); the mask's gradient in
// double, row after row.
//
// Range: where the sum lies in [2^-64, 2^100] and |scale| <= 1, nothing has left the range that could show in a normal
// result: what underflows is below 2^-126, 2^-62 of the sum. In any other row dy is taken times a power of two that
// brings its largest magnitude over a weight to [1, 2), and the power goes back with the last factor; where that factor
// nears the end of the range the last products are done in the next wider type. Either way no power of two rounds, so
// the result is linear in dy bit for bit (F4).
//
// NaN and infinity: of a dy under a masked weight nothing is read (it counts as 0); every other one makes the row's
// gradients not finite, also where the weight underflowed to 0 (F2). Masked gradients are 0.
#include "cpu/row_sum.h"
#include "cpu/softmax_row.h"
#include "cpu/softmax_tile.h"

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

// The weights of a row as forward kept them.
template <class A>
struct KeptWeights {
  const A* weights;
  ALLFINITE_INLINE Vec<A> operator()(int64_t i, int64_t count) const { return load_some<A>(weights + i, count); }
};
// Those of a row of 16 bits, made again and left in `weights`.
template <class Row, class Top>
struct NewWeights {
  const Row& row;
  Top top;
  float inverse;
  float* weights;
  ALLFINITE_INLINE Vec<float> operator()(int64_t i, int64_t count) const {
    const Vec<float> v = row.weight(i, count, top) * inverse;
    store_some(weights + i, v, count);
    return v;
  }
};

// The sum over a row of dy * weights; kPower: times power.
template <bool kPower, class T, class A, class Weights>
ALLFINITE_INLINE double dot(const T* dy, A power, const Weights& weights, int64_t n) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> total;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> sum[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<A> v = load_some<A>(dy + i, count);
      sum[u] = fma(kPower ? v * power : v, weights(i, count), sum[u]);
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

// The largest magnitude of dy where its weight is not 0.
template <class T, class A>
A largest_weighed(const T* dy, const A* weights, int64_t n) {
  Vec<A> largest = {};
  for (int64_t i = 0; i < n; i += kWidth<A>) {
    const int64_t count = n - i < kWidth<A> ? n - i : kWidth<A>;
    const Vec<A> magnitude = abs(load_some<A>(dy + i, count));
    largest = max(load_some<A>(weights + i, count) != A(0) ? magnitude : Vec<A>{}, largest);
  }
  return max_lanes<A>(largest);
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

template <class T, Product kProduct>
class BackwardRows {
 public:
  using A = Accumulate<T>;

  explicit BackwardRows(const SoftmaxBackwardArgs& a)
      : a_(a),
        scale_(a.scale),
        mask_(a.mask, static_cast<A*>(scratch_part(a.scratch, a.n, 0)), a.n),
        clean_(static_cast<T*>(scratch_part(a.scratch, a.n, 1))),
        weights_(static_cast<A*>(scratch_part(a.scratch, a.n, 2))) {}

  void run() {
    const T *dy = static_cast<const T*>(a_.dy), *kept = static_cast<const T*>(kNarrow ? a_.x : a_.y);
    T* dx = static_cast<T*>(a_.dx);
    const int64_t n = a_.n;
    if (a_.inner == 1) {
      for (int64_t i = a_.begin; i < a_.end; ++i) {
        const int64_t r = a_.order ? a_.order[i] : i;
        one({r, r * n, 1, dy + r * n, kept + r * n, dx ? dx + r * n : nullptr});
      }
      return;
    }
    T *dys = tile_part<T>(a_.tiles, n, 0), *kepts = tile_part<T>(a_.tiles, n, 1), *dxs = tile_part<T>(a_.tiles, n, 2);
    for (int64_t t = a_.begin; t < a_.end; ++t) {
      const ColumnTile tile(a_.inner, n, sizeof(T), t);
      gather_columns(dy + tile.offset, a_.inner, n, tile.columns, dys);
      gather_columns(kept + tile.offset, a_.inner, n, tile.columns, kepts);
      for (int64_t c = 0; c < tile.columns; ++c) {
        one({tile.first_row + c, tile.offset + c, a_.inner, dys + c * n, kepts + c * n, dxs + c * n});
      }
      scatter_columns(dxs, a_.inner, n, tile.columns, dx + tile.offset);
    }
  }

 private:
  static constexpr bool kNarrow = sizeof(T) == 2;

  struct Row {
    int64_t index, offset, step;  // offset, step: of its elements in memory
    const T *dy, *kept;           // kept: x of 16 bits, else y
    T* dx;
  };

  void one(Row row) {
    if constexpr (kNarrow) {
      const SoftmaxRowNumbers numbers = a_.numbers[row.index];
      const A* bias = mask_.row(row.index);
      if (kProduct == Product::kAdded && !(numbers.top <= kLargestAdded && numbers.top >= -kLargestAdded)) {
        again<Product::kWide>(row, bias, numbers);
      } else {
        again<kProduct>(row, bias, numbers);
      }
    } else {
      differentiate(row, row.kept, KeptWeights<A>{row.kept});
    }
  }

  template <Product kThis>
  void again(const Row& row, const A* bias, const SoftmaxRowNumbers& numbers) {
    using Scores = RowScores<T, kThis>;
    using Top = typename Scores::Top;
    const Scores scores(row.kept, bias, a_.n, scale_);
    const NewWeights<Scores, Top> weights{scores, static_cast<Top>(numbers.top), static_cast<float>(numbers.inverse),
                                          weights_};
    differentiate(row, weights_, weights);
  }

  // `make(i, count)`: the weights, which then lie in `weights`.
  template <class Weights>
  ALLFINITE_INLINE void differentiate(const Row& row, const A* weights, const Weights& make) {
    constexpr double kSmallest = 0x1p-64, kLargest = 0x1p100;
    const double sum = dot<false>(row.dy, A(1), make, a_.n), magnitude = __builtin_fabs(sum);
    if (magnitude >= kSmallest && magnitude <= kLargest && __builtin_fabs(a_.scale) <= 1) {
      finish({row.dy, weights, a_.n, A(1), static_cast<A>(sum), 1}, row);
    } else {
      differentiate_times_power(row, weights);
    }
  }

  __attribute__((noinline)) void differentiate_times_power(const Row& row, const A* weights) {
    const T* dy = row.dy;
    A largest = widen<A>(largest_magnitude(dy, a_.n));
    if (!__builtin_isfinite(largest)) {
      dy = without_masked(row);
      largest = widen<A>(largest_magnitude(dy, a_.n));
    }
    int exponent = 0;
    if (__builtin_isfinite(largest)) {
      exponent = binary_exponent(largest_weighed(dy, weights, a_.n));
      if (binary_exponent(largest) > exponent) {
        dy = without_weightless(dy, weights);
      }
    }
    const A power = power_of_two<A>(-exponent);
    const A mean = static_cast<A>(dot<true>(dy, power, KeptWeights<A>{weights}, a_.n));
    const Gradient<T> gradient{dy, weights, a_.n, power, mean, power_of_two<double>(exponent)};
    if (__builtin_isfinite(mean)) {
      finish(gradient, row);
    } else {
      write_beside_masked(gradient, row);
    }
  }

  ALLFINITE_INLINE void finish(const Gradient<T>& gradient, const Row& row) {
    if (row.dx) {
      gradient.write(a_.scale, row.dx);
    }
    if (a_.sums) {
      gradient.add_to(a_.sums);
    }
  }

  // NaN and infinity show in all gradients but the masked ones.
  void write_beside_masked(const Gradient<T>& g, const Row& row) {
    const A* bias = mask_.row(row.index);
    for (int64_t i = 0; i < a_.n; ++i) {
      const A ds = masked(row, i, bias) ? A(0) : g.centred(i, 1)[0] * g.weights[i] * static_cast<A>(g.factor);
      if (row.dx) {
        row.dx[i] = narrow<T>(static_cast<A>(ds * static_cast<A>(scale_.wide)));
      }
      if (a_.sums) {
        a_.sums[i] += static_cast<double>(ds);
      }
    }
  }

  const T* without_masked(const Row& row) {
    const A* bias = mask_.row(row.index);
    for (int64_t i = 0; i < a_.n; ++i) {
      clean_[i] = masked(row, i, bias) ? T{} : row.dy[i];
    }
    return clean_;
  }
  // A finite dy of a weight of 0 has no part in any gradient; times the row's power of two it may overflow.
  const T* without_weightless(const T* dy, const A* weights) {
    for (int64_t i = 0; i < a_.n; ++i) {
      clean_[i] = weights[i] == 0 ? T{} : dy[i];
    }
    return clean_;
  }

  bool masked(const Row& row, int64_t i, const A* bias) const {
    return is_masked(static_cast<const T*>(a_.x)[row.offset + i * row.step], bias ? bias[i] : A(0), scale_);
  }

  const SoftmaxBackwardArgs& a_;
  const Scale<A> scale_;
  MaskRows<A> mask_;
  T* clean_;
  A* weights_;
};

}  // namespace

void softmax_backward(const SoftmaxBackwardArgs& args) {
  visit_rows(args.dtype, args.scale, args.mask, [&](auto tag, auto product) {
    using T = typename decltype(tag)::type;
    constexpr Product kProduct = sizeof(T) == 2 ? decltype(product)::value : Product::kPlain;  // else not looked at
    BackwardRows<T, kProduct>(args).run();
  });
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
