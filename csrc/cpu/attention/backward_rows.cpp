// Attention backward, what is done once a query row: delta before the products, dQ after them.
//
// delta = sum of P dP - grad_lse = sum over the columns of dO O - grad_lse, with O as it was before it was rounded to
// the dtype (the forward keeps it); with a rounded O it would be wrong where one key has nearly all weight.
//
// The unit of a row's dS comes from the larger of |dO| |V| and |grad_lse| (F1: in the unit of a tiny V alone the
// gradient of lse leaves the range), while dO keeps its own for dV, where the gradient of lse has no part.
//
// Bytes: dO, O and the parts of dQ read once, dQ written once; 1 / Sk of the backward's work. Sums: fp32 (fp64).
#include "cpu/attention/attention.h"
#include "cpu/attention/backward.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class Delta {
 public:
  explicit Delta(const AttentionDeltaArgs& args) : args_(args), p_(args.problem) {}

  void slice(int64_t slice) const {
    const RowTile t{slice / p_.heads, slice % p_.heads, 0, p_.queries};
    const Scores<A> scores(p_);
    const int64_t first = scores.packed_row(p_.grad, t), stats_row = kAttentionStats + p_.value_depth;
    const int value_exponent = p_.value.exponents[scores.packed_key(p_.value, t)];
    const A* grads = static_cast<const A*>(p_.grad.row_major) + first * p_.grad.padded_columns;
    const A* outputs = static_cast<const A*>(args_.stats) + slice * p_.queries * stats_row + kAttentionStats;
    A* delta = static_cast<A*>(args_.delta) + slice * p_.queries * kAttentionDelta;
    for (int64_t i = 0; i < p_.queries; ++i, delta += kAttentionDelta) {
      const A* grad = grads + i * p_.grad.padded_columns;
      const A sum = dot(grad, outputs + i * stats_row);
      delta[0] = sum;
      delta[1] = delta[2] = 0;
      if (args_.grad_lse) {
        const A grad_lse = static_cast<const A*>(args_.grad_lse)[slice * p_.queries + i];
        const A largest = static_cast<const A*>(p_.value.largest)[scores.packed_key(p_.value, t)];
        const int products =
            value_exponent + p_.grad.exponents[first + i];  // dP of the row is stored times 2^-products
        const int more = more_exponent(products_size(grad, largest), exponent_of(grad_lse), products);
        delta[1] = times_power(grad_lse, -products - more);
        delta[2] = static_cast<A>(more);
        delta[0] = times_power(sum, -more) - delta[1];
        p_.grad.state[scores.query_slice(t) - p_.grad.first] |= more == 0 ? 0 : kAttentionScaled;
      }
    }
  }

 private:
  static constexpr int kNone = -(1 << 20);  // of 0 and of what is not finite

  static int exponent_of(A v) {
    const A magnitude = __builtin_fabs(v);
    int exponent = kNone;
    if (magnitude > 0 && magnitude <= std::numeric_limits<A>::max()) {
      __builtin_frexp(static_cast<double>(magnitude), &exponent);
    }
    return exponent;
  }

  // Of a bound of dP as it is stored: the largest of a row of dO times the largest V.
  int products_size(const A* grad, A largest_value) const {
    A largest = 0;
    for (int64_t i = 0; i < p_.value_depth; ++i) {
      const A v = __builtin_fabs(grad[i]);
      largest = v > largest ? v : largest;
    }
    const int grads = exponent_of(largest), values = exponent_of(largest_value);
    return grads == kNone || values == kNone ? kNone : grads + values;
  }

  static int more_exponent(int products_size, int grad_lse, int products) {
    constexpr int range = kExponentRange<A>;
    const int lse_size = grad_lse == kNone ? kNone : grad_lse - products;
    const int size = products_size > lse_size ? products_size : lse_size;
    return size == kNone ? 0 : exponent_out_of(size, range, 2 * range);
  }

  static A times_power(A v, int exponent) {
    return exponent == 0 ? v : static_cast<A>(__builtin_ldexp(static_cast<double>(v), exponent));
  }

  A dot(const A* a, const A* b) const {
    constexpr int64_t w = kWidth<A>;
    Vec<A> sum = {};
    int64_t i = 0;
    for (; i + w <= p_.value_depth; i += w) {
      sum = fma(load<A>(a + i), load<A>(b + i), sum);
    }
    if (i < p_.value_depth) {
      sum = fma(load<A>(a + i), load_partial<A>(b + i, p_.value_depth - i), sum);
    }
    return row_total<A>(sum);
  }

  const AttentionDeltaArgs& args_;
  const AttentionProblem& p_;
};

template <class A>
class QueryGrad {
 public:
  explicit QueryGrad(const AttentionQueryGradArgs& args) : args_(args), p_(args.problem), scale_(p_.scale) {}

  void run() const {
    const int64_t group = p_.heads / p_.kv_heads;
    const int64_t batch = args_.slice / p_.kv_heads, first_head = args_.slice % p_.kv_heads * group;
    for (int64_t i = 0; i < group; ++i) {
      const RowTile t{batch, first_head + i, args_.begin, args_.end - args_.begin};
      A* sums = static_cast<A*>(args_.parts) + (i * p_.query.padded_rows + t.row) * p_.query.padded_columns;
      add_parts(sums, t.rows * p_.query.padded_columns, group);
      if (args_.grad_query) {
        write(t, sums);
      }
    }
  }

 private:
  void add_parts(A* sums, int64_t n, int64_t group) const {
    const int64_t size = group * p_.query.padded_rows * p_.query.padded_columns;
    for (int64_t part = 1; part < args_.count; ++part) {
      for (int64_t i = 0; i < n; ++i) {
        sums[i] += sums[part * size + i];
      }
    }
  }

  void write(const RowTile& t, const A* sums) const {
    const Scores<A> scores(p_);
    const int64_t row = scores.query_slice(t) * p_.queries + t.row;
    const int32_t* exponents = p_.grad.exponents + scores.packed_row(p_.grad, t);
    const A* delta = static_cast<const A*>(args_.delta) + row * kAttentionDelta;
    const int common = p_.value.exponents[scores.packed_key(p_.value, t)] +
                       p_.key.exponents[scores.packed_key(p_.key, t)] + scale_.exponent;
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t r = 0; r < t.rows; ++r) {
        T* out = static_cast<T*>(args_.grad_query) + (row + r) * p_.depth;
        const int more = static_cast<int>(delta[r * kAttentionDelta + 2]);
        write_row(out, sums + r * p_.query.padded_columns, p_.depth, scale_.fraction, exponents[r] + more + common);
      }
    });
  }

  const AttentionQueryGradArgs& args_;
  const AttentionProblem& p_;
  Scale<A> scale_;
};

}  // namespace

void attention_delta(const AttentionDeltaArgs& args) {
  const auto run = [&](auto a) {
    const Delta<typename decltype(a)::type> delta(args);
    for (int64_t slice = args.begin; slice < args.end; ++slice) {
      delta.slice(slice);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

void attention_query_grad(const AttentionQueryGradArgs& args) {
  args.problem.dtype == DType::kFloat64 ? QueryGrad<double>(args).run() : QueryGrad<float>(args).run();
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
