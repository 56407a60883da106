// The weights of one softmax row before they are divided by their sum, exp(score - largest score).
//
// score = scale * x + bias, where a bool mask is a bias of 0 or -inf. A score of -inf is masked: its weight is 0 by
// selection, whatever x is beneath a mask. What is subtracted is exact to one rounding at any magnitude of the scores:
//   kPlain  scale (x - largest x), where no float bias is added; the difference first, so that logits of 1e5 lose
//           nothing and the largest weight is exactly 1. The difference overflows only where the weight is 0.
//   kPair   the same with the product as two numbers, for fp32 results: a weight of 2^-126 has an exponent of 87, half
//           an ulp of which is 2^-18 already.
//   kWide   scores in the next wider type (fp32: double, fp64: long double), for a float bias, and for a scale by which
//           a finite difference could leave the range. A finite bias neither masks nor overflows.
//   kAdded  16-bit rows with a float bias, |scale| <= 1: scores in fp32, each off by an ulp of itself. Rows whose
//           largest score is beyond kLargestAdded, so that this is above 2^-20, are done as kWide. (bf16, whose
//           products may cancel a bias of any size: where fp32 holds the scale exactly and one fused operation rounds.)
#pragma once
#include "cpu/math.h"
#include "cpu/softmax.h"
#include "cpu/softmax_exp.h"
#include "cpu/softmax_mask.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

enum class Product { kPlain, kPair, kWide, kAdded };

constexpr float kLargestAdded = 16;

// Two vectors of numbers that are not NaN, one behind the other.
template <class T>
ALLFINITE_INLINE void store_two(T* p, Vec<Accumulate<T>> a, Vec<Accumulate<T>> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    alignas(64) static constexpr uint16_t kUpperWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                             23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                             45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const auto rounded = [](Vec<float> v) {
      const Vec<uint32_t> bits = (Vec<uint32_t>)v;
      return (__m512i)(bits + 0x7fffu + ((bits >> 16) & 1u));
    };
    _mm512_storeu_si512(p, _mm512_permutex2var_epi16(rounded(a), _mm512_load_si512(kUpperWords), rounded(b)));
    return;
  }
#endif
  store(p, a);
  store(p + kWidth<Accumulate<T>>, b);
}

// --- scores in the next wider type ---------------------------------------------------------------------------------

// The scores of one Vec<A>.
template <class A>
struct WideScores;

template <>
struct WideScores<float> {
  using Number = double;
  static ALLFINITE_INLINE WideScores nothing() { return {{splat(-kInfinity<double>), splat(-kInfinity<double>)}}; }
  static ALLFINITE_INLINE WideScores of(Vec<float> x, Vec<float> bias, double scale) {
    FloatsForDoubles xs[2], biases[2];
    std::memcpy(xs, &x, sizeof x);
    std::memcpy(biases, &bias, sizeof bias);
    WideScores s;
    for (int h = 0; h < 2; ++h) {
      const Vec<double> b = to_doubles(biases[h]);
      s.half[h] = b == -kInfinity<double> ? b : fma(to_doubles(xs[h]), splat(scale), b);
    }
    return s;
  }
  // NaN raises nothing.
  ALLFINITE_INLINE void raise(const WideScores& other) {
    for (int h = 0; h < 2; ++h) {
      half[h] = max(other.half[h], half[h]);
    }
  }
  ALLFINITE_INLINE Number largest() const { return max_lanes<double>(max(half[0], half[1])); }
  ALLFINITE_INLINE Vec<float> minus(Number top) const {
    Vec<float> result;
#if defined(__AVX512F__)
    const __m256 low = _mm512_cvtpd_ps(half[0] - top), high = _mm512_cvtpd_ps(half[1] - top);
    result = (Vec<float>)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#else
    const FloatsForDoubles halves[2] = {__builtin_convertvector(half[0] - top, FloatsForDoubles),
                                        __builtin_convertvector(half[1] - top, FloatsForDoubles)};
    std::memcpy(&result, halves, sizeof result);
#endif
    return result;
  }
  Vec<double> half[2];
};

template <>
struct WideScores<double> {
  using Number = long double;
  static ALLFINITE_INLINE WideScores nothing() {
    WideScores s;
    for (Number& score : s.lane) {
      score = -kInfinity<Number>;
    }
    return s;
  }
  static ALLFINITE_INLINE WideScores of(Vec<double> x, Vec<double> bias, double scale) {
    WideScores s;
    for (int i = 0; i < kWidth<double>; ++i) {
      const Number b = static_cast<Number>(bias[i]);
      s.lane[i] = bias[i] == -kInfinity<double> ? b : static_cast<Number>(x[i]) * static_cast<Number>(scale) + b;
    }
    return s;
  }
  ALLFINITE_INLINE void raise(const WideScores& other) {
    for (int i = 0; i < kWidth<double>; ++i) {
      lane[i] = other.lane[i] > lane[i] ? other.lane[i] : lane[i];
    }
  }
  ALLFINITE_INLINE Number largest() const {
    Number top = lane[0];
    for (int i = 1; i < kWidth<double>; ++i) {
      top = lane[i] > top ? lane[i] : top;
    }
    return top;
  }
  ALLFINITE_INLINE Vec<double> minus(Number top) const {
    Vec<double> result;
    for (int i = 0; i < kWidth<double>; ++i) {
      result[i] = static_cast<double>(lane[i] - top);
    }
    return result;
  }
  Number lane[kWidth<double>];
};

// --- scale ---------------------------------------------------------------------------------------------------------

template <class A>
struct Scale {
  explicit Scale(double scale)
      : sign(scale < 0 ? A(-1) : A(1)),
        high(static_cast<A>(scale)),
        low(static_cast<A>(scale - static_cast<double>(high))),
        binary(static_cast<A>(scale * 0x1.71547652b82fep0)),
        wide(clamp(scale)) {
    if constexpr (std::is_same_v<A, float>) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, high) & 0xffffff00u;  // towards zero
      upper = __builtin_bit_cast(float, bits);
      // Never 0 and of the same sign, so that an infinite x gives no NaN.
      lower = static_cast<float>(scale - static_cast<double>(upper));
      lower = lower == 0 ? upper * 0x1p-60f : lower;
    }
  }

  // Beyond 2^800 any two numbers of A that differ, differ by more than every exponent: the result is the same.
  static double clamp(double scale) {
    constexpr double kLimit = std::is_same_v<A, float> ? 0x1p800 : std::numeric_limits<double>::max();
    return scale > kLimit ? kLimit : scale < -kLimit ? -kLimit : scale;
  }
  // Whether `product` serves rows of T without a float bias.
  template <class T>
  static Product product(double scale) {
    constexpr double kLimit = std::is_same_v<A, float> ? 0x1p100 : 0x1p900;
    const double magnitude = __builtin_fabs(scale);
    if (!(magnitude >= 1 / kLimit && magnitude <= kLimit)) {
      return Product::kWide;
    }
    int exponent = 0;
    if (!std::is_same_v<T, float> || __builtin_frexp(magnitude, &exponent) == 0.5) {
      return Product::kPlain;  // a double has digits to spare, 16 bits have few; a power of two does not round
    }
    return kFusedMultiplyAdd ? Product::kPair : Product::kWide;
  }

  A sign, high, low;       // scale = high + low
  A binary;                // scale * log2 e
  A upper = 0, lower = 0;  // upper + lower = scale to 2^-40 of it, of one sign
  double wide;
};

// Whether the score of x is -inf.
template <class T, class A>
bool is_masked(T x, A bias, const Scale<A>& scale) {
  return bias == -kInfinity<A> || (bias < kInfinity<A> && scale.wide != 0 && widen<A>(x) * scale.sign == -kInfinity<A>);
}

// --- rows ----------------------------------------------------------------------------------------------------------

template <class T, Product kProduct>
class RowScores {
 public:
  using A = Accumulate<T>;
  using Top = std::conditional_t<kProduct == Product::kWide, typename WideScores<A>::Number, A>;

  RowScores(const T* x, const A* bias, int64_t n, const Scale<A>& scale) : x_(x), bias_(bias), n_(n), scale_(scale) {}

  // The largest score, as x or wide; infinite where none takes part or only NaN does: see empty().
  ALLFINITE_INLINE Top top() const {
    if constexpr (kProduct == Product::kWide) {
      WideScores<A> largest = WideScores<A>::nothing();
      for (int64_t i = 0; i < n_; i += kWidth<A>) {
        largest.raise(wide(i, width(i)));
      }
      return largest.largest();
    } else if constexpr (kProduct == Product::kAdded) {
      return largest_of([&](int64_t i, int64_t count) { return added(i, count); });
    } else if (scale_.sign > 0) {
      return largest_of([&](int64_t i, int64_t count) { return visible_x(i, count); });
    } else {
      return -largest_of([&](int64_t i, int64_t count) { return -visible_x(i, count); });
    }
  }
  // Whether nothing takes part.
  bool empty(Top top) const {
    constexpr bool kScores = kProduct == Product::kWide || kProduct == Product::kAdded;
    const bool lowest = top == -kInfinity<A> * (kScores ? A(1) : scale_.sign);
    return lowest && !any_nan();
  }

  // exp(score - top) * 2^kLift<T> of `count` elements, 0 in the other lanes and where masked.
  ALLFINITE_INLINE Vec<A> weight(int64_t i, int64_t count, Top top) const {
    const Vec<A> zero = {};
    if constexpr (kProduct == Product::kWide) {
      return exp_below_zero<T>(wide(i, count).minus(top), zero);
    } else if constexpr (kProduct == Product::kAdded) {
      return exp2_below_zero<T>((added(i, count) - top) * 0x1.715476p0f);
    } else {
      const Vec<A> difference = visible_x(i, count) - top;
      if constexpr (kProduct == Product::kPair) {
        const Vec<A> exponent = difference * scale_.high;
        const Vec<A> rest = fma(difference, splat(scale_.high), -exponent);
        return exp_below_zero<T>(exponent, fma(difference, splat(scale_.low), rest));
      } else if constexpr (sizeof(T) == 2) {
        return exp2_below_zero<T>(difference * scale_.binary);
      } else {
        return exp_below_zero<T>(difference * scale_.high, zero);
      }
    }
  }

  bool masked(int64_t i) const { return is_masked(x_[i], bias_ ? bias_[i] : A(0), scale_); }

 private:
  ALLFINITE_INLINE int64_t width(int64_t i) const { return n_ - i < kWidth<A> ? n_ - i : kWidth<A>; }

  // x of `count` elements; in the other lanes, and where the bias is -inf, what makes a score of -inf.
  ALLFINITE_INLINE Vec<A> visible_x(int64_t i, int64_t count) const {
    const A hidden = -scale_.sign * kInfinity<A>;
    Vec<A> v = load_some<A>(x_ + i, count);
    if (bias_) {
      v = load_some<A>(bias_ + i, count) == -kInfinity<A> ? splat(hidden) : v;
    }
    return count == kWidth<A> ? v : lanes_within(v, 0, count, hidden);
  }

  ALLFINITE_INLINE Vec<A> added(int64_t i, int64_t count) const {
    const Vec<A> x = load_some<A>(x_ + i, count), bias = load_some<A>(bias_ + i, count);
    const Vec<A> score = std::is_same_v<T, BFloat16> ? fma(x, splat(scale_.high), bias)
                                                     : fma(x, splat(scale_.lower), fma(x, splat(scale_.upper), bias));
    const Vec<A> v = bias == -kInfinity<A> ? bias : score;
    return count == kWidth<A> ? v : lanes_within(v, 0, count, -kInfinity<A>);
  }

  template <class Value>
  ALLFINITE_INLINE A largest_of(Value value) const {
    constexpr int kLanes = 4;
    Vec<A> lane[kLanes];
    for (Vec<A>& v : lane) {
      v = splat(-kInfinity<A>);
    }
    int64_t i = 0;
    for (; i + kLanes * kWidth<A> <= n_; i += kLanes * kWidth<A>) {
      for (int u = 0; u < kLanes; ++u) {
        lane[u] = max(value(i + u * kWidth<A>, kWidth<A>), lane[u]);
      }
    }
    for (; i < n_; i += kWidth<A>) {
      lane[0] = max(value(i, width(i)), lane[0]);
    }
    return max_lanes<A>(max(max(lane[0], lane[1]), max(lane[2], lane[3])));
  }

  // Where no score is larger than -inf: whether a NaN takes part after all.
  bool any_nan() const {
    for (int64_t i = 0; i < n_; ++i) {
      if (!masked(i)) {
        return true;
      }
    }
    return false;
  }

  ALLFINITE_INLINE WideScores<A> wide(int64_t i, int64_t count) const {
    Vec<A> bias = bias_ ? load_some<A>(bias_ + i, count) : Vec<A>{};
    bias = count == kWidth<A> ? bias : lanes_within(bias, 0, count, -kInfinity<A>);
    return WideScores<A>::of(load_some<A>(x_ + i, count), bias, scale_.wide);
  }

  const T* x_;
  const A* bias_;
  int64_t n_;
  const Scale<A>& scale_;
};

// The scratch memory of a kernel, in parts of n numbers.
inline void* scratch_part(void* scratch, int64_t n, int part) {
  return static_cast<char*>(scratch) + softmax_scratch_bytes(n) / 3 * part;
}

// f(row, its largest score): the row in kWide where kAdded does not serve.
template <class T, Product kProduct, class F>
ALLFINITE_INLINE void with_top(const T* x, const Accumulate<T>* bias, int64_t n, const Scale<Accumulate<T>>& scale,
                               F&& f) {
  const RowScores<T, kProduct> row(x, bias, n, scale);
  const auto top = row.top();
  if constexpr (kProduct == Product::kAdded) {
    if (!(top <= kLargestAdded && top >= -kLargestAdded)) {
      const RowScores<T, Product::kWide> wide(x, bias, n, scale);
      f(wide, wide.top());
      return;
    }
  }
  f(row, top);
}

// f(Tag<T>, product as a constant): T is the storage type of the rows.
template <class F>
void visit_rows(DType dtype, double scale, const SoftmaxMask& mask, F&& f) {
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const bool added = mask.data && !mask.is_bool;
    const Product product = Scale<Accumulate<T>>::template product<T>(scale);
    if constexpr (sizeof(T) == 2) {
      const bool exact = kFusedMultiplyAdd && static_cast<double>(static_cast<float>(scale)) == scale;
      if (added && product == Product::kPlain && __builtin_fabs(scale) <= 1 && (exact || std::is_same_v<T, Half>)) {
        f(tag, std::integral_constant<Product, Product::kAdded>{});
        return;
      }
    }
    if (added || product == Product::kWide) {
      f(tag, std::integral_constant<Product, Product::kWide>{});
    } else if (product == Product::kPlain || !std::is_same_v<T, float>) {
      f(tag, std::integral_constant<Product, Product::kPlain>{});
    } else if constexpr (std::is_same_v<T, float>) {
      f(tag, std::integral_constant<Product, Product::kPair>{});
    }
  });
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
