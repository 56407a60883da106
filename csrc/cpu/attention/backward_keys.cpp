// Attention backward, by keys: dV = dropout(P)^T dO and dK = scale dS^T Q for one tile of keys, over all query rows and
// all heads that share the key head, in order (F5; the sum over a group of heads is in fp32).
//
// Work: 2 Sq Sk (D + Dv) multiply-adds. P, dP and dS of a tile are made again; they never leave the cache. Sums: fp32
// (fp64) within a tile of rows, then tile by tile. Rows of Q and dO that hold a NaN or infinity were packed as zeros
// and are added where they take part (F2).
#include "cpu/attention/attention.h"
#include "cpu/attention/backward.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int64_t kSumRows = round_up(kAttentionKeys, kAttentionRowAlign);  // keys, padded to register blocks

template <class A>
class BackwardKeys {
 public:
  explicit BackwardKeys(const AttentionKeysArgs& args)
      : args_(args),
        p_(args.problem),
        scale_(p_.scale),
        buffer_(static_cast<A*>(args.scratch)),
        tiles_(args.problem, args.stats, buffer_) {
    part_.weights = buffer_ + 2 * kAttentionKeys;
    part_.gradients = part_.weights + kMatrix;
    part_.slopes = part_.gradients + kMatrix;
    part_.row_step = kAttentionKeys;
    key_sums_ = part_.slopes + kMatrix;
    value_sums_ = key_sums_ + kSumRows * p_.query.padded_columns;
    row_ = value_sums_ + kSumRows * p_.grad.padded_columns;
  }

  void task(int64_t index) {
    const int64_t tiles = round_up(p_.keys, kAttentionKeys) / kAttentionKeys;
    const int64_t tile = index % tiles, slice = index / tiles, group = p_.heads / p_.kv_heads;
    const int64_t batch = slice / p_.kv_heads, first_head = slice % p_.kv_heads * group;
    const int64_t rows_used = round_up(scores().keys_in(tile), kAttentionRowAlign);
    clear(key_sums_, rows_used * p_.query.padded_columns);
    clear(value_sums_, rows_used * p_.grad.padded_columns);
    const Exponents exponents = largest_exponents(batch, first_head, group);
    for (int64_t head = first_head; head < first_head + group; ++head) {
      for (int64_t row = 0; row < p_.queries; row += kAttentionRows) {
        const RowTile t{batch, head, row, smaller(kAttentionRows, p_.queries - row)};
        const KeyRange seen = scores().tiles(t);
        if (seen.begin <= tile && tile < seen.end) {
          rows(t, tile, exponents);
        }
      }
    }
    write(slice, tile, exponents);
  }

 private:
  static constexpr int64_t kMatrix = kAttentionRows * kAttentionKeys + kAttentionColumnAlign;

  // Rows come in their own powers of two; the sums are in the largest of them.
  struct Exponents {
    int key, value;
  };

  const Scores<A>& scores() const { return tiles_.scores(); }

  Exponents row_exponents(const RowTile& t, int64_t r) const {
    const int grad = p_.grad.exponents[scores().query_slice(t) * p_.grad.padded_rows + t.row + r];
    const int query = p_.query.exponents[scores().query_slice(t) * p_.query.padded_rows + t.row + r];
    return {grad + query, grad};
  }

  Exponents largest_exponents(int64_t batch, int64_t first_head, int64_t group) const {
    Exponents largest = row_exponents({batch, first_head, 0, 1}, 0);
    for (int64_t head = first_head; head < first_head + group; ++head) {
      for (int64_t row = 0; row < p_.queries; ++row) {
        const Exponents e = row_exponents({batch, head, row, 1}, 0);
        largest.key = e.key > largest.key ? e.key : largest.key;
        largest.value = e.value > largest.value ? e.value : largest.value;
      }
    }
    return largest;
  }

  void rows(const RowTile& t, int64_t tile, const Exponents& common) {
    const int64_t columns = scores().columns_in(tile);
    const A* delta = static_cast<const A*>(args_.delta) + scores().query_slice(t) * p_.queries + t.row;
    tiles_.weights_and_gradients(t, tile, part_);
    for (int64_t r = 0; r < t.rows; ++r) {
      A* weights = part_.weights + r * part_.row_step;
      A* gradients = part_.gradients + r * part_.row_step;
      tiles_.score_gradients(weights, gradients, columns, delta[r]);
      if (p_.softcap > 0) {
        tiles_.through_softcap(weights, gradients, part_.slopes + r * part_.row_step, columns);
      }
      if (p_.dropout_p > 0) {
        scores().drop(t, r, tile, weights, buffer_);
      }
      const Exponents own = row_exponents(t, r);
      to_exponent(weights, columns, own.value - common.value);
      to_exponent(gradients, columns, own.key - common.key);
    }
    if (args_.grad_value) {
      add_rows(t, tile, part_.weights, p_.grad, args_.grad, value_sums_);
    }
    if (args_.grad_key) {
      add_rows(t, tile, part_.gradients, p_.query, args_.query, key_sums_);
    }
  }

  static void clear(A* sums, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      sums[i] = 0;
    }
  }

  static void to_exponent(A* row, int64_t columns, int exponent) {
    if (exponent != 0) {
      const A factor = power_of_two<A>(exponent);
      for (int64_t j = 0; j < columns; ++j) {
        row[j] *= factor;
      }
    }
  }

  // sums[key] += sum over the rows of coefficients[row][key] * packed row
  void add_rows(const RowTile& t, int64_t tile, const A* coefficients, const AttentionPacked& packed,
                const AttentionTensor& source, A* sums) {
    const int64_t first = scores().query_slice(t) * packed.padded_rows + t.row;
    Product<A> product{};
    product.a = coefficients;
    product.a_row = 1;
    product.a_k = part_.row_step;
    product.b = static_cast<const A*>(packed.row_major) + first * packed.padded_columns;
    product.b_row = packed.padded_columns;
    product.c = sums;
    product.c_row = packed.padded_columns;
    product.rows = scores().keys_in(tile);
    product.depth = t.rows;
    product.columns = round_up(packed.columns, kWidth<A>);
    multiply<Into::kAdd>(product);
    add_non_finite(packed.non_finite + first, t.rows, coefficients, part_.weights, 1, part_.row_step, product.rows,
                   sums, packed.padded_columns, packed.columns, [&](int64_t k) {
                     read_row(source, t.batch, t.head, t.row + k, packed.columns,
                              power_of_two<A>(-packed.exponents[first + k]), row_);
                     return row_;
                   });
  }

  void write(int64_t slice, int64_t tile, const Exponents& exponents) const {
    const int value_exponent = p_.value.exponents[slice];
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t k = 0; k < scores().keys_in(tile); ++k) {
        const int64_t row = slice * p_.keys + tile * kAttentionKeys + k;
        if (args_.grad_value) {
          write_row(static_cast<T*>(args_.grad_value) + row * p_.value_depth, value_sums_ + k * p_.grad.padded_columns,
                    p_.value_depth, A(1), exponents.value);
        }
        if (args_.grad_key) {
          write_row(static_cast<T*>(args_.grad_key) + row * p_.depth, key_sums_ + k * p_.query.padded_columns, p_.depth,
                    scale_.fraction, exponents.key + value_exponent + scale_.exponent);
        }
      }
    });
  }

  const AttentionKeysArgs& args_;
  const AttentionProblem& p_;
  Scale<A> scale_;
  A* buffer_;
  Tile<A> part_;
  A *key_sums_, *value_sums_, *row_;
  BackwardTiles<A> tiles_;
};

}  // namespace

void attention_backward_keys(const AttentionKeysArgs& args) {
  const auto run = [&](auto a) {
    BackwardKeys<typename decltype(a)::type> backward(args);
    for (int64_t task = args.begin; task < args.end; ++task) {
      backward.task(task);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
