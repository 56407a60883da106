// Attention forward: O = dropout(softmax(scores)) V and lse, one tile of query rows at a time, online over tiles of
// keys (Milakov and Gimelshein 2018), so the scores never exist as a whole.
//
// Work: 2 Sq Sk (D + Dv) fused multiply-adds; memory: the packed tensors (4 bytes an element, read from cache tile by
// tile) and the output. Floor: the multiply-add rate. Scores, weights, sums: fp32 (fp64 for fp64), whatever the dtype;
// the maximum is subtracted before the multiplication by 4 / ln 2; the output is rounded once.
//
// A tile of keys that is wholly masked for a row leaves that row as it was, bit for bit, so neither the row's
// neighbours nor the tile of rows it falls in matter (F5). Masked rows of V never count (F2: packed as zeros where they
// are not finite). A row without any key: output 0, lse -inf (F7).
#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class Forward {
 public:
  explicit Forward(const AttentionForwardArgs& args)
      : args_(args), p_(args.problem), scores_(args.problem), columns_(p_.value.padded_columns) {
    weights_ = static_cast<A*>(args.scratch);
    sums_ = weights_ + kAttentionRows * kAttentionKeys;
    buffer_ = sums_ + kAttentionRows * columns_;
    value_row_ = buffer_ + 2 * kAttentionKeys;
  }

  void task(int64_t index) {
    const int64_t tiles = round_up(p_.queries, kAttentionRows) / kAttentionRows;
    RowTile t{index / tiles / p_.heads, index / tiles % p_.heads, index % tiles * kAttentionRows, 0};
    t.rows = smaller(kAttentionRows, p_.queries - t.row);
    for (int64_t i = 0; i < round_up(t.rows, kAttentionRowAlign) * columns_; ++i) {
      sums_[i] = 0;
    }
    for (int64_t r = 0; r < kAttentionRows; ++r) {
      largest_[r] = -std::numeric_limits<A>::infinity();
      total_[r] = 0;
      keep_[r] = 1;
    }
    const KeyRange range = scores_.tiles(t);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      scores_(t, tile, weights_, nullptr, kAttentionKeys, buffer_);
      for (int64_t r = 0; r < t.rows; ++r) {
        weigh(t, tile, r);
      }
      add_values(t, tile);
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      finish(t, r);
    }
  }

 private:
  void weigh(const RowTile& t, int64_t tile, int64_t r) {
    A* row = weights_ + r * kAttentionKeys;
    const int64_t columns = scores_.columns_in(tile);
    const A found = Scores<A>::row_max(row, columns);
    const A largest = found > largest_[r] ? found : largest_[r];
    // What the sums so far are worth beside the new maximum. Unchanged: exactly 1, also where both are -inf.
    keep_[r] = largest == largest_[r] ? A(1) : exp(splat((largest_[r] - largest) * A(4)))[0];
    total_[r] = total_[r] * keep_[r] + Scores<A>::weigh(row, columns, largest, A(1));
    largest_[r] = largest;
    if (p_.dropout_p > 0) {
      scores_.drop(t, r, tile, row, buffer_);
    }
  }

  void add_values(const RowTile& t, int64_t tile) {
    const int64_t first = scores_.key_slice(t) * p_.value.padded_rows + tile * kAttentionKeys;
    Product<A> product{};
    product.a = weights_;
    product.a_row = kAttentionKeys;
    product.a_k = 1;
    product.b = static_cast<const A*>(p_.value.row_major) + first * columns_;
    product.b_row = columns_;
    product.c = sums_;
    product.c_row = columns_;
    product.rows = t.rows;
    product.depth = scores_.keys_in(tile);
    product.columns = round_up(p_.value_depth, kWidth<A>);
    multiply<Into::kKeepAndAdd>(product, keep_);
    add_non_finite(p_.value.non_finite + first, product.depth, weights_, weights_, kAttentionKeys, 1, t.rows, sums_,
                   columns_, p_.value_depth, [&](int64_t k) { return original(t, tile * kAttentionKeys + k); });
  }

  // A row of V as it was given, in the units of the packed rows.
  const A* original(const RowTile& t, int64_t key) {
    const A factor = power_of_two<A>(-p_.value.exponents[scores_.key_slice(t)]);
    read_row(args_.value, t.batch, t.head / (p_.heads / p_.kv_heads), key, p_.value_depth, factor, value_row_);
    return value_row_;
  }

  void finish(const RowTile& t, int64_t r) {
    const int64_t row = scores_.query_slice(t) * p_.queries + t.row + r;
    const bool empty = total_[r] == 0;
    const A inverse = empty ? A(0) : 1 / total_[r];
    const int64_t slice = scores_.key_slice(t);
    A* sums = sums_ + r * columns_;
    for (int64_t i = 0; i < p_.value_depth; ++i) {
      sums[i] *= inverse;
    }
    if (p_.value.exponents[slice] > 0 && p_.dropout_p == 0) {
      clamp(sums, static_cast<const A*>(p_.value.largest)[slice]);
    }
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      T* output = static_cast<T*>(args_.output) + row * p_.value_depth;
      write_row(output, sums, p_.value_depth, A(1), p_.value.exponents[slice]);
    });
    const double log_sum =
        static_cast<double>(largest_[r]) * 4 + (empty ? 0.0 : __builtin_log(static_cast<double>(total_[r])));
    static_cast<A*>(args_.lse)[row] = static_cast<A>(log_sum);
    A* stats = static_cast<A*>(args_.stats) + row * kAttentionStats;
    stats[0] = largest_[r];
    stats[1] = inverse;
  }

  // The output is a mean of V: a rounding must not carry it past the largest V, and so to infinity.
  void clamp(A* sums, A limit) const {
    for (int64_t i = 0; i < p_.value_depth; ++i) {
      const A magnitude = __builtin_fabs(sums[i]);
      if (magnitude > limit && magnitude <= std::numeric_limits<A>::max()) {
        sums[i] = sums[i] < 0 ? -limit : limit;
      }
    }
  }

  const AttentionForwardArgs& args_;
  const AttentionProblem& p_;
  Scores<A> scores_;
  int64_t columns_;
  A *weights_, *sums_, *buffer_, *value_row_;
  A largest_[kAttentionRows], total_[kAttentionRows], keep_[kAttentionRows];
};

}  // namespace

void attention_forward(const AttentionForwardArgs& args) {
  const auto run = [&](auto a) {
    Forward<typename decltype(a)::type> forward(args);
    for (int64_t task = args.begin; task < args.end; ++task) {
      forward.task(task);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
