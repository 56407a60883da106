// Cross entropy backward: dx = g * ((Q + Z) * p - q), row by row, with the row's incoming gradient g (divided by the
// denominator), the sum Q of its masses q, and Z = 2 * z_loss * w * lse.
//
// Bytes: the logits read and dx written once, 2 b per element; the masses, where there are any per element, read once.
// Floor: copy bandwidth.
//
// p = exp(x - from) * exp(from - m) / sum; the row's factors are multiplied in double and rounded to fp32 once, so that
// an element is rounded in exp, in one fused multiply-add and to its dtype. Everything is linear in g, which comes with
// the loss scale in it: bit for bit under powers of two.
// The target's element in double: beyond p = 1/2 as g * (-Q * (sum of the other p) + (Q - q) + Z * p), where p - 1
// would cancel; up to there as g * ((Q + Z) * p - q), where the sum of the others would, under label smoothing.
//
// Range: rows whose factors leave fp32's range are done in double. p below 2^-126 is 0. An ignored row is not read and
// gives 0; a row with a NaN or infinite normalizer gives NaN.
#include "cpu/cross_entropy.h"
#include "cpu/cross_entropy_row.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// The factor of a row in fp32 is at most the product of these, 2^120, and stays finite whatever it is multiplied with.
// They are two limits, because what a gradient in [2^-60, 2^60] is multiplied with, and so the arithmetic, must not
// depend on it.
constexpr double kLargestGrad = 0x1p100, kLargestFactor = 0x1p20;

struct NoMass {};

// What a row needs, in double.
struct Row {
  double grad;                     // incoming, divided by the denominator
  double largest, log_sum, third;  // the statistics
  double mass, z_factor;           // Q, Z

  double lse() const { return largest + log_sum; }
  // What exp(x - from) is multiplied with, without the gradient.
  double factor_of_grad(double from) const { return (mass + z_factor) * __builtin_exp((from - largest) - log_sum); }
};

template <class T>
void fill(T* p, int64_t n, float value) {
  const T stored = narrow<T>(value);
  for (int64_t i = 0; i < n; ++i) {
    p[i] = stored;
  }
}

// dx = factor * exp(x - from) - grad * mass.
template <class A, class T, class Exp, class Mass>
void write_row(const T* x, T* dx, int64_t n, A grad, A row_factor, const Exp& exp, const Mass& mass) {
  constexpr int w = kWidth<A>;
  const Vec<A> factor = splat(row_factor);
  const auto one = [&](Vec<A> v, int64_t i, int64_t count) {
    if constexpr (std::is_same_v<Mass, NoMass>) {
      return exp(v) * factor;
    } else {
      return fma(exp(v), factor, mass(i, count) * -grad);
    }
  };
  int64_t i = 0;
  for (; i + w <= n; i += w) {
    store(dx + i, one(load<A>(x + i), i, w));
  }
  if (i < n) {
    store_partial(dx + i, one(load_partial<A>(x + i, n - i), i, n - i), n - i);
  }
}

// make_mass(A): the masses in arithmetic A. In double where fp32 is not enough.
template <class A, class T, class MakeMass>
void write_row_in_range(const T* x, T* dx, int64_t n, const Row& row, const MakeMass& make_mass) {
  const auto write = [&](auto a, const auto& exp, double factor) {
    using B = decltype(a);
    write_row<B>(x, dx, n, static_cast<B>(row.grad), static_cast<B>(row.grad * factor), exp, make_mass(a));
  };
  with_row_exp<A>(row.largest, [&](const auto& exp) {
    const double factor = row.factor_of_grad(exp.from());
    if (row.grad * factor != row.grad * factor) {
      fill(dx, n, __builtin_nanf(""));
    } else if (__builtin_fabs(factor) <= kLargestFactor && __builtin_fabs(row.grad) <= kLargestGrad) {
      write(A{}, exp, factor);
    } else {
      const RowExp<double> wide(row.largest);
      write(double{}, wide, row.factor_of_grad(wide.from()));
    }
  });
}

template <class A, class T>
void index_row(const CrossEntropyRows& r, Row row, int64_t target, const T* x, T* dx) {
  const double weight = class_weight<A>(r, target), share = r.smoothing / static_cast<double>(r.n);
  row.mass = (1 - r.smoothing) * weight + share * r.weight_sum;
  row.z_factor = 2 * r.z_loss * weight * row.lse();
  if (r.smoothing == 0) {
    write_row_in_range<A>(x, dx, r.n, row, [](auto) { return NoMass{}; });
  } else {
    write_row_in_range<A>(x, dx, r.n, row, [&](auto a) { return smoothed_mass<decltype(a), A>(r); });
  }
  const double probability = __builtin_exp((widen<double>(x[target]) - row.largest) - row.log_sum);
  const double own = (1 - r.smoothing + share) * weight;
  const double of_masses =
      probability > 0.5 ? share * (r.weight_sum - weight) - row.mass * row.third : row.mass * probability - own;
  dx[target] = narrow<T>(row.grad * (of_masses + row.z_factor * probability));
}

// dq = -grad * (1 - smoothing) * weight * log p; a weight of 0 gives 0, whatever x is.
template <class A, class T, class P, class W>
void write_probability_gradient(const T* x, P* dq, int64_t n, const Row& row, double kept, const W* weight) {
  constexpr int w = kWidth<A>;
  const A largest = static_cast<A>(row.largest), log_sum = static_cast<A>(row.log_sum);
  const A factor = static_cast<A>(row.grad * kept);
  for (int64_t i = 0; i < n; i += w) {
    const int64_t count = n - i < w ? n - i : w;
    const Vec<A> minus_log_p = (largest - load_some<A>(x + i, count)) + log_sum;
    Vec<A> result = minus_log_p * factor;
    if (weight) {
      const Vec<A> q = load_some<A>(weight + i, count);
      const Vec<A> weighted = minus_log_p * (q * factor);
      result = q == 0 && minus_log_p == minus_log_p ? Vec<A>{} : weighted;
    }
    store_partial(dq + i, result, count);
  }
}

template <class A, class T, class P>
void probability_row(const CrossEntropyBackwardArgs& args, int64_t i, Row row, const T* x) {
  const CrossEntropyRows& r = args.rows;
  row.mass = row.third;
  row.z_factor = 2 * r.z_loss * row.lse();
  if (args.dx) {
    write_row_in_range<A>(x, static_cast<T*>(args.dx) + i * r.n, r.n, row,
                          [&](auto a) { return probability_mass<decltype(a), A, P>(r, i); });
  }
  if (args.dprobability) {
    P* dq = static_cast<P*>(args.dprobability) + i * r.n;
    const A* weight = static_cast<const A*>(r.weight);
    const double kept = 1 - r.smoothing;
    if (__builtin_fabs(row.grad) <= kLargestGrad && __builtin_fabs(row.largest) <= kLargestGrad) {
      write_probability_gradient<A>(x, dq, r.n, row, kept, weight);
    } else {
      write_probability_gradient<double>(x, dq, r.n, row, kept, weight);
    }
  }
}

template <class T, class P>
void backward_rows(const CrossEntropyBackwardArgs& args) {
  using A = Accumulate<T>;
  const CrossEntropyRows& r = args.rows;
  for (int64_t i = r.begin; i < r.end; ++i) {
    const T* x = static_cast<const T*>(r.x) + i * r.x_stride;
    const A* stats = static_cast<const A*>(r.stats) + i * kCrossEntropyStats;
    Row row{};
    row.grad = static_cast<double>(static_cast<const A*>(args.grad)[i * args.grad_stride]) / args.denominator;
    row.largest = stats[0];
    row.log_sum = stats[1];
    row.third = stats[2];
    if (!r.target) {
      probability_row<A, T, P>(args, i, row, x);
    } else if (r.target[i] == r.ignore_index) {
      fill(static_cast<T*>(args.dx) + i * r.n, r.n, 0);
    } else {
      index_row<A>(r, row, r.target[i], x, static_cast<T*>(args.dx) + i * r.n);
    }
  }
}

}  // namespace

void cross_entropy_backward(const CrossEntropyBackwardArgs& args) {
  visit_cross_entropy(
      args.rows, [&](auto t, auto p) { backward_rows<typename decltype(t)::type, typename decltype(p)::type>(args); });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
