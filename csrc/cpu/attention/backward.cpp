// Attention backward: dV = dropout(P)^T dO, dK = scale dS^T Q and dQ = scale dS K, one tile of keys at a time, over all
// query rows and all heads that share the key head, in order.
//
// Work: Sq Sk (3 D + 2 Dv) multiply-adds, the five products that there are, half of that if causal. Floor: the
// multiply-add rate. What is left beside it: exp and the rest of P and dS, about 25 operations a score (6 % of the time
// at D = 64), dQ read and written once a tile of keys, packing (1 / Sk of the work). P, dP and dS of a tile never leave
// the cache. Sums: fp32 (fp64) within a tile, then tile by tile.
//
// A call does some tiles of keys of one (batch, kv_head) and owns their dK and dV. Their share of dQ is a sum of its
// own; the shares are added in order afterwards, so nothing depends on who computed which (F5).
// dO of a row is in its own power of two, taken back at the end (F4). Rows of Q, K and dO that hold a NaN or infinity
// were packed as zeros and are added where they take part (F2).
#include "cpu/attention/backward.h"

#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class Backward {
 public:
  explicit Backward(const AttentionBackwardArgs& args)
      : args_(args),
        p_(args.problem),
        scale_(p_.scale),
        tile_(p_, args.stats, args.delta, static_cast<A*>(args.scratch)),
        group_(p_.heads / p_.kv_heads),
        batch_(args.slice / p_.kv_heads),
        first_head_(args.slice % p_.kv_heads * group_) {
    constexpr int64_t sum_rows = round_up(kAttentionKeys, kAttentionRowAlign);  // keys, padded to register blocks
    key_sums_ = tile_.rest();
    value_sums_ = key_sums_ + sum_rows * p_.query.padded_columns;
    row_ = value_sums_ + sum_rows * p_.grad.padded_columns;
    find_exponents();
  }

  void keys(int64_t tile) {
    const int64_t rows_used = round_up(scores().keys_in(tile), kAttentionRowAlign);
    fill(key_sums_, 0, rows_used * p_.query.padded_columns, A(0));
    fill(value_sums_, 0, rows_used * p_.grad.padded_columns, A(0));
    for (int64_t head = first_head_; head < first_head_ + group_; ++head) {
      for (int64_t row = 0; row < p_.queries; row += kAttentionRows) {
        const RowTile t{batch_, head, row, smaller(kAttentionRows, p_.queries - row)};
        const KeyRange seen = scores().tiles(t);
        if (seen.begin <= tile && tile < seen.end && !scores().wholly_masked(t, tile)) {
          rows(t, tile);
        }
      }
    }
    write(tile);
  }

 private:
  // Rows come in their own powers of two (that of V stays out of it); the sums over them are in the largest.
  struct Exponents {
    int key, value;
  };

  const Scores<A>& scores() const { return tile_.scores(); }

  Exponents row_exponents(const RowTile& t, int64_t r) const {
    const int grad = p_.grad.exponents[scores().packed_row(p_.grad, t) + r];
    const int scores_unit = grad + tile_.more_exponent(t, r);
    return {scores_unit + p_.query.exponents[scores().packed_row(p_.query, t) + r], grad};
  }

  void find_exponents() {
    for (int64_t head = first_head_; head < first_head_ + group_; ++head) {
      const RowTile t{batch_, head, 0, p_.queries};
      scaled_ |= Scores<A>::has(p_.grad, scores().query_slice(t), kAttentionScaled) ||
                 Scores<A>::has(p_.query, scores().query_slice(t), kAttentionScaled);
    }
    if (!scaled_) {
      return;
    }
    bool any_key = false, any_value = false;
    for (int64_t head = first_head_; head < first_head_ + group_; ++head) {
      for (int64_t row = 0; row < p_.queries; ++row) {
        const RowTile t{batch_, head, row, 1};
        const Exponents e = row_exponents(t, 0);
        if (!zero_row(p_.query, t)) {
          largest_.key = any_key && largest_.key > e.key ? largest_.key : e.key;
          any_key = true;
        }
        if (!zero_row(p_.grad, t)) {
          largest_.value = any_value && largest_.value > e.value ? largest_.value : e.value;
          any_value = true;
        }
      }
    }
  }

  // Such a row adds nothing, and has no say in the power of two of the sum, in which the others might vanish.
  // (Of a slice that is not finite, rows are packed without their numbers.)
  bool zero_row(const AttentionPacked& packed, const RowTile& t) const {
    if (Scores<A>::has(packed, scores().query_slice(t), kAttentionNonFinite)) {
      return false;
    }
    const A* numbers = static_cast<const A*>(packed.row_major) + scores().packed_row(packed, t) * packed.padded_columns;
    for (int64_t i = 0; i < packed.columns; ++i) {
      if (numbers[i] != 0) {
        return false;
      }
    }
    return true;
  }

  void rows(const RowTile& t, int64_t tile) {
    const Band band = scores().band(t, tile);
    tile_.compute(t, tile, band);
    tile_.to_products(t, tile, band);
    if (args_.query_sums) {
      add_to_queries(t, tile, band);
    }
    if (scaled_) {
      to_common_exponent(t, tile, band);
    }
    if (args_.grad_value) {
      add_to_keys(t, tile, band, tile_.weights(), p_.grad, args_.grad, value_sums_);
    }
    if (args_.grad_key) {
      add_to_keys(t, tile, band, tile_.gradients(), p_.query, args_.query, key_sums_);
    }
  }

  // sums[row] += sum over the keys of dS[row][key] * packed K
  void add_to_queries(const RowTile& t, int64_t tile, const Band& band) {
    const int64_t slice = scores().packed_key(p_.key, t), columns = p_.key.padded_columns;
    const int64_t first = slice * p_.key.padded_rows + tile * kAttentionKeys;
    Product<A> product{};
    product.a = tile_.gradients();
    product.a_row = kAttentionKeys;
    product.a_k = 1;
    product.b = static_cast<const A*>(p_.key.row_major) + first * columns;
    product.b_row = columns;
    product.c = static_cast<A*>(args_.query_sums) + ((t.head - first_head_) * p_.query.padded_rows + t.row) * columns;
    product.c_row = columns;
    product.rows = t.rows;
    product.depth = scores().keys_in(tile);
    product.columns = round_up(p_.depth, kWidth<A>);
    product.a_band = band;
    multiply<Into::kAdd>(product);
    if (Scores<A>::has(p_.key, scores().key_slice(t), kAttentionNonFinite)) {
      const A factor = power_of_two<A>(-p_.key.exponents[slice]);
      add_non_finite(p_.key.non_finite + first, product, tile_.weights(), p_.depth, [&](int64_t k) {
        read_row(args_.key, t.batch, t.head / group_, tile * kAttentionKeys + k, p_.depth, factor, row_);
        return row_;
      });
    }
  }

  void to_common_exponent(const RowTile& t, int64_t tile, const Band& band) const {
    for (int64_t r = 0; r < t.rows; ++r) {
      const Span span = scores().span(band, r, scores().keys_in(tile));
      const Exponents own = row_exponents(t, r);
      // Above 1 only where the row is zero.
      const A value = power_of_two<A>(static_cast<int>(smaller(own.value - largest_.value, 0)));
      const A key = power_of_two<A>(static_cast<int>(smaller(own.key - largest_.key, 0)));
      for (int64_t j = span.begin; j < span.end; ++j) {
        tile_.weights(r)[j] *= value;
        tile_.gradients(r)[j] *= key;
      }
    }
  }

  // sums[key] += sum over the rows of coefficients[row][key] * packed row
  void add_to_keys(const RowTile& t, int64_t tile, const Band& band, const A* coefficients,
                   const AttentionPacked& packed, const AttentionTensor& source, A* sums) {
    const int64_t first = scores().packed_row(packed, t);
    Product<A> product{};
    product.a = coefficients;
    product.a_row = 1;
    product.a_k = kAttentionKeys;
    product.b = static_cast<const A*>(packed.row_major) + first * packed.padded_columns;
    product.b_row = packed.padded_columns;
    product.c = sums;
    product.c_row = packed.padded_columns;
    product.rows = scores().keys_in(tile);
    product.depth = t.rows;
    product.columns = round_up(packed.columns, kWidth<A>);
    product.a_band = {1 - band.high, 1 - band.low};  // seen from the keys
    multiply<Into::kAdd>(product);
    if (Scores<A>::has(packed, scores().query_slice(t), kAttentionNonFinite)) {
      add_non_finite(packed.non_finite + first, product, tile_.weights(), packed.columns, [&](int64_t k) {
        read_row(source, t.batch, t.head, t.row + k, packed.columns, power_of_two<A>(-packed.exponents[first + k]),
                 row_);
        return row_;
      });
    }
  }

  void write(int64_t tile) {
    const int64_t slice = args_.slice - p_.key.first;
    const int value_exponent = p_.value.exponents[slice];
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t k = 0; k < scores().keys_in(tile); ++k) {
        const int64_t row = args_.slice * p_.keys + tile * kAttentionKeys + k;
        if (args_.grad_value) {
          write_row(static_cast<T*>(args_.grad_value) + row * p_.value_depth, value_sums_ + k * p_.grad.padded_columns,
                    p_.value_depth, A(1), largest_.value);
        }
        if (args_.grad_key) {
          write_row(static_cast<T*>(args_.grad_key) + row * p_.depth, key_sums_ + k * p_.query.padded_columns, p_.depth,
                    scale_.fraction, largest_.key + value_exponent + scale_.exponent);
        }
      }
    });
  }

  const AttentionBackwardArgs& args_;
  const AttentionProblem& p_;
  Scale<A> scale_;
  BackwardTile<A> tile_;
  int64_t group_, batch_, first_head_;
  Exponents largest_ = {};
  bool scaled_ = false;
  A *key_sums_, *value_sums_, *row_;
};

}  // namespace

void attention_backward(const AttentionBackwardArgs& args) {
  const auto run = [&](auto a) {
    Backward<typename decltype(a)::type> backward(args);
    for (int64_t tile = args.begin; tile < args.end; ++tile) {
      backward.keys(tile);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
