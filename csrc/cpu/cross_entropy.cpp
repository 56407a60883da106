// Cross entropy forward, row by row: loss = sum over classes of q * (lse - x), plus z_loss * w * lse^2.
//
// Bytes: the logits are read once, b per element; statistics and losses are 20 bytes a row. Floor: read bandwidth in
// fp32; for 16 bits the one exp per element (13 vector instructions, 2 more for the conversion) comes first.
// Label smoothing and class probabilities pass over the row a second time, from cache.
// Left: on one thread of a 2-core Xeon with AVX-512 about 3.9 ns a vector of 16, where exp alone takes 2.7: 16 GB/s of
// fp32 logits in cache, 8 of 16-bit ones. A row costs some 100 ns of its own (three logarithms and exponentials in
// double, the folding of lanes), a quarter of the time at 1 000 classes.
//
// One pass for maximum and sum: exp is taken of x - from, where `from` is near the maximum of the row's first elements.
// Only where the row's own maximum turns out to lie more than kMargin above that, the row is summed again.
//
// The target's own exp stays out of the sum: with it log p = -log1p(sum of the others) where it is the largest, and
// its gradient is -(sum of the others), neither of which cancels.
//
// Accumulation: fp32 in chains of 8, those in double (row_sum.h); everything of a row that is one number in double.
// NaN and +inf: the row is NaN, and so is one of -inf only. -inf: probability 0; its mass, unless 0, makes the loss
// +inf. Sums that leave fp32's range are done again in double. An ignored row is not read.
#include "cpu/cross_entropy.h"

#include "cpu/cross_entropy_row.h"
#include "cpu/row_sum.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 4;                 // independent accumulators, to cover the latency of an addition
constexpr int64_t kReferenceLength = 64;  // elements whose maximum exp is taken from
constexpr double kMargin = 40;            // exp(kMargin) * 2^31 elements is still finite in fp32
constexpr double kInfinity = __builtin_inf();
constexpr double kNaN = __builtin_nan("");

template <class A>
using IndexOf = std::conditional_t<std::is_same_v<A, float>, int32_t, int64_t>;

// 0, 1, 2, ...
template <class A>
ALLFINITE_INLINE Vec<IndexOf<A>> lane_numbers() {
  Vec<IndexOf<A>> numbers = {};
  for (int i = 0; i < kWidth<A>; ++i) {
    numbers[i] = i;
  }
  return numbers;
}

// Maximum of all elements and sum of exp(x - from) over all but one, from any number of ranges.
template <class A, class T, class Exp>
class ExpSum {
 public:
  ExpSum(const T* x, const Exp& exp) : x_(x), exp_(exp), largest_(splat(-std::numeric_limits<A>::infinity())) {}

  // Whole vectors from begin to end.
  ALLFINITE_INLINE void add_vectors(int64_t begin, int64_t end) {
    constexpr int w = kWidth<A>;
    constexpr int64_t block = kChain * kLanes * w;
    for (int64_t start = begin; start < end; start += block) {
      const int64_t stop = start + block < end ? start + block : end;
      Vec<A> lane[kLanes] = {}, largest[kLanes] = {largest_, largest_, largest_, largest_};
      const auto step = [&](int u, int64_t i) {
        const Vec<A> v = load<A>(x_ + i);
        largest[u] = max(v, largest[u]);
        lane[u] += exp_(v);
      };
      int64_t i = start;
      for (; i + kLanes * w <= stop; i += kLanes * w) {
        for (int u = 0; u < kLanes; ++u) {
          step(u, i + u * w);
        }
      }
      for (int u = 0; i < stop; i += w, ++u) {
        step(u, i);
      }
      largest_ = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
      sum_.add((lane[0] + lane[1]) + (lane[2] + lane[3]));
    }
  }

  // The vector at i; only its lanes from `first` on count, and of those not number `skipped`.
  ALLFINITE_INLINE void add_lanes(Vec<A> v, int first, int skipped) {
    const Vec<IndexOf<A>> lane = lane_numbers<A>();
    const Vec<A> e = exp_(v);
    largest_ = max(lane >= first ? v : splat(-std::numeric_limits<A>::infinity()), largest_);
    sum_.add(lane >= first && lane != skipped ? e : Vec<A>{});
  }

  A largest() const { return max_lanes<A>(largest_); }
  double sum() const { return sum_.total(); }

 private:
  const T* x_;
  Exp exp_;
  Vec<A> largest_;
  WideSum<A> sum_;
};

template <class A>
struct Sums {
  A largest;
  double sum, from;
};
template <class A, class T, class Exp>
Sums<A> sum_row(const T* x, int64_t n, const Exp& exp, int64_t skipped) {
  constexpr int w = kWidth<A>;
  ExpSum<A, T, Exp> result(x, exp);
  if (n < w) {
    // At the end of the vector, where the lanes that count are in the general case.
    T last[w] = {};
    for (int64_t i = 0; i < n; ++i) {
      last[w - n + i] = x[i];
    }
    result.add_lanes(load<A>(last), static_cast<int>(w - n), skipped < 0 ? -1 : static_cast<int>(w - n + skipped));
    return {result.largest(), result.sum(), exp.from()};
  }
  const int64_t whole = n / w * w;
  const int64_t at = skipped >= 0 && skipped < whole ? skipped / w * w : whole;
  result.add_vectors(0, at);
  if (at < whole) {
    result.add_lanes(load<A>(x + at), 0, static_cast<int>(skipped - at));
    result.add_vectors(at + w, whole);
  }
  if (whole < n) {  // the last whole vector of the row, without what was in an earlier one
    const int64_t start = n - w;
    result.add_lanes(load<A>(x + start), static_cast<int>(whole - start),
                     skipped >= whole ? static_cast<int>(skipped - start) : -1);
  }
  return {result.largest(), result.sum(), exp.from()};
}

template <class A, class T>
A largest_of(const T* x, int64_t n) {
  constexpr int w = kWidth<A>;
  const A lowest = -std::numeric_limits<A>::infinity();
  Vec<A> largest = splat(lowest);
  int64_t i = 0;
  for (; i + w <= n; i += w) {
    largest = max(load<A>(x + i), largest);
  }
  A result = max_lanes<A>(largest);
  for (; i < n; ++i) {
    const A v = widen<A>(x[i]);
    result = v > result ? v : result;
  }
  return result;
}

// A row's maximum and, divided by exp(maximum), the sum of all exp but that of the skipped element (-1: none).
struct Normalizer {
  double largest, others;
};

template <class A, class T>
Normalizer normalize(const T* x, int64_t n, int64_t skipped) {
  const auto sum_from = [&](A reference) {
    return with_row_exp<A>(reference, [&](const auto& exp) { return sum_row<A>(x, n, exp, skipped); });
  };
  const A first = largest_of<A>(x, n < kReferenceLength ? n : kReferenceLength);
  Sums<A> sum = sum_from(first == -kInfinity ? A(0) : first);
  const A largest = sum.largest;
  if (largest > -kInfinity && !(static_cast<double>(largest) - static_cast<double>(first) <= kMargin)) {
    sum = sum_from(largest);
  }
  if (!(__builtin_fabs(largest) < kInfinity)) {
    return {static_cast<double>(largest), kNaN};
  }
  return {static_cast<double>(largest), sum.sum * __builtin_exp(sum.from - static_cast<double>(largest))};
}

// The sums of mass and of mass * (largest - x) over a row; a mass of 0 adds nothing, whatever x is.
struct MassSums {
  double mass, product;
};
template <class A, class T, class Mass>
MassSums sum_masses_in(const T* x, int64_t n, A largest, const Mass& mass) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * w;
  WideSum<A> masses, products;
  for (int64_t start = 0; start < n; start += block) {
    Vec<A> sum = {}, product = {};
    for (int64_t i = start; i < n && i < start + block; i += w) {
      const int64_t count = n - i < w ? n - i : w;
      Vec<A> q = mass(i, count);
      if (count < w) {
        q = first_lanes(q, count);
      }
      sum += q;
      // Halves, so that the difference of the largest numbers stays finite in double.
      const Vec<A> half = A(0.5) * largest - A(0.5) * load_some<A>(x + i, count);
      product += q == 0 ? Vec<A>{} : (A(2) * q) * half;
    }
    masses.add(sum);
    products.add(product);
  }
  return {masses.total(), products.total()};
}

// make_mass(A): the masses in arithmetic A. In double where fp32 is not enough.
template <class A, class T, class MakeMass>
MassSums sum_masses(const T* x, int64_t n, double largest, const MakeMass& make_mass) {
  const MassSums sums = sum_masses_in<A>(x, n, static_cast<A>(largest), make_mass(A{}));
  if constexpr (!std::is_same_v<A, double>) {
    if (!__builtin_isfinite(sums.mass) || !__builtin_isfinite(sums.product)) {
      return sum_masses_in<double>(x, n, largest, make_mass(double{}));
    }
  }
  return sums;
}

// mass * value, where no mass of an infinite value is nothing.
double product(double mass, double value) {
  return mass == 0 && __builtin_isinf(value) ? 0 : mass * value;
}

template <class A>
void write_stats(const CrossEntropyRows& r, int64_t row, double largest, double log_sum, double third) {
  A* stats = static_cast<A*>(r.stats) + row * kCrossEntropyStats;
  stats[0] = static_cast<A>(largest);
  stats[1] = static_cast<A>(log_sum);
  stats[2] = static_cast<A>(third);
}

// log of the sum of exp(x - largest). Where the largest is nearly all there is, it is summed without it again: the
// others would be lost beside its 1.
template <class A, class T>
double log_of_sum(const T* x, int64_t n, const Normalizer& all) {
  if (!(all.others < 1.25)) {
    return __builtin_log(all.others);
  }
  int64_t at = 0;
  while (widen<double>(x[at]) != all.largest) {
    ++at;
  }
  return __builtin_log1p(normalize<A>(x, n, at).others);
}

template <class A, class T>
double index_row(const CrossEntropyRows& r, int64_t row, const T* x) {
  const int64_t target = r.target[row];
  const auto [largest, others] = normalize<A>(x, r.n, target);
  const double logit = widen<double>(x[target]), weight = class_weight<A>(r, target);
  const bool is_largest = logit == largest;
  const double total = others + (is_largest ? 1 : __builtin_exp(logit - largest));
  const double log_sum = is_largest         ? __builtin_log1p(others)
                         : r.smoothing == 0 ? __builtin_log(total)
                                            : log_of_sum<A>(x, r.n, {largest, total});
  write_stats<A>(r, row, largest, log_sum, others / total);

  double loss = product((1 - r.smoothing) * weight, (largest - logit) + log_sum);
  if (r.smoothing != 0) {
    const auto sums = sum_masses<A>(x, r.n, largest, [&](auto a) { return smoothed_mass<decltype(a), A>(r); });
    loss += sums.product + r.smoothing / static_cast<double>(r.n) * r.weight_sum * log_sum;
  }
  if (r.z_loss != 0) {
    const double lse = largest + log_sum;
    loss += r.z_loss * weight * lse * lse;
  }
  return loss;
}

template <class A, class T, class P>
double probability_row(const CrossEntropyRows& r, int64_t row, const T* x) {
  const Normalizer all = normalize<A>(x, r.n, -1);
  const double largest = all.largest, log_sum = log_of_sum<A>(x, r.n, all);
  const auto sums = sum_masses<A>(x, r.n, largest, [&](auto a) { return probability_mass<decltype(a), A, P>(r, row); });
  write_stats<A>(r, row, largest, log_sum, sums.mass);
  const double lse = largest + log_sum;
  return sums.product + sums.mass * log_sum + (r.z_loss == 0 ? 0 : r.z_loss * lse * lse);
}

template <class T, class P>
void forward_rows(const CrossEntropyForwardArgs& args) {
  using A = Accumulate<T>;
  const CrossEntropyRows& r = args.rows;
  for (int64_t row = r.begin; row < r.end; ++row) {
    const T* x = static_cast<const T*>(r.x) + row * r.x_stride;
    if (r.target && r.target[row] == r.ignore_index) {
      write_stats<A>(r, row, 0, 0, 0);
      args.loss[row] = 0;
    } else {
      args.loss[row] = r.target ? index_row<A>(r, row, x) : probability_row<A, T, P>(r, row, x);
    }
  }
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForwardArgs& args) {
  visit_cross_entropy(
      args.rows, [&](auto t, auto p) { forward_rows<typename decltype(t)::type, typename decltype(p)::type>(args); });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
