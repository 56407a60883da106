// Attention forward: O = dropout(softmax(scores)) V and lse, one tile of query rows at a time, online over tiles of
// keys (Milakov and Gimelshein 2018), so the scores never exist as a whole.
//
// Work: Sq Sk (D + Dv) fused multiply-adds, half of that if causal; memory: the packed tensors (4 bytes an element,
// read from cache tile by tile), the output, and the output once more in fp32 for the backward. Floor: the multiply-add
// rate. What is left beside it: exp and maximum, about 20 operations a score (a sixth of the time at D = 64; a mask or
// bias adds 2 or 3 and no pass over the tile), and packing, which is 1 / Sk of the work. Scores, weights, sums: fp32
// (fp64 for fp64), whatever the dtype; the maximum is subtracted before the multiplication by 4 / ln 2; the output is
// rounded once.
//
// A tile of keys that is wholly masked for a row leaves that row as it was, bit for bit, so neither the row's
// neighbours nor the tile of rows it falls in matter (F5); a tile that a bool mask leaves out for all rows is skipped.
// Masked rows of V never count (F2: packed as zeros where they
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
    fill(sums_, 0, round_up(t.rows, kAttentionRowAlign) * columns_, A(0));
    fill(largest_, 0, kAttentionRows, -std::numeric_limits<A>::infinity());
    fill(total_, 0, kAttentionRows * kWidth<A>, A(0));
    fill(count_, 0, kAttentionRows * kWidth<A>, A(0));
    const KeyRange range = scores_.tiles(t);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      if (scores_.wholly_masked(t, tile)) {
        continue;
      }
      const Band band = scores_.band(t, tile);
      scores_.dot(p_.query, p_.key, t, tile, band, weights_, kAttentionKeys);
      weigh(t, tile, band);
      add_values(t, tile, band);
    }
    finish(t);
  }

 private:
  void weigh(const RowTile& t, int64_t tile, const Band& band) {
    const int64_t keys = scores_.keys_in(tile);
    const bool simple = scores_.simple(t);
    A found[kAttentionRows];
    fill(found, t.rows, kAttentionRows, -std::numeric_limits<A>::infinity());
    for (int64_t r = 0; r < t.rows; ++r) {
      A* row = weights_ + r * kAttentionKeys;
      const Span span = scores_.span(band, r, keys);
      found[r] =
          simple ? simple_scores(t, tile, r, span, row) : scores_.row_scores(t, tile, r, span, row, nullptr, buffer_);
    }
    raise_largest(found);
    const bool marked = Scores<A>::has(p_.value, scores_.key_slice(t), kAttentionNonFinite);
    for (int64_t r = 0; r < t.rows; ++r) {
      A* row = weights_ + r * kAttentionKeys;
      const Span span = scores_.span(band, r, keys);
      marked ? to_weights<true>(row, span, r) : to_weights<false>(row, span, r);
      if (p_.dropout_p > 0) {
        scores_.drop(t, r, tile, span, row, buffer_);
      }
    }
  }

  ALLFINITE_INLINE A simple_scores(const RowTile& t, int64_t tile, int64_t r, const Span& span, A* row) const {
    Vec<A> largest = splat(Scores<A>::kMasked);
    scores_.each_score(t, tile, r, span, row, [&](int64_t j, Vec<A> score) {
      largest = max(score, largest);
      store(row + j, score);
    });
    return row_largest<A>(largest);
  }

  // keep: what the sums so far are worth beside the new maximum. Unchanged: exactly 1, also where both are -inf.
  void raise_largest(const A* found) {
    for (int64_t r = 0; r < kAttentionRows; r += kWidth<A>) {
      const Vec<A> old = load<A>(largest_ + r), now = max(load<A>(found + r), old);
      store(keep_ + r, now == old ? splat(A(1)) : exp_of_quarters(old - now));
      store(largest_ + r, now);
    }
  }

  // Sums over the keys stay in lanes until the end. A row that has seen no key yet takes any maximum but -inf.
  template <bool kMarked>
  ALLFINITE_INLINE void to_weights(A* row, const Span& span, int64_t r) {
    const A largest = largest_[r] == Scores<A>::kMasked ? A(0) : largest_[r];
    Vec<A> sum = load<A>(total_ + r * kWidth<A>) * keep_[r], count = load<A>(count_ + r * kWidth<A>);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      const Vec<A> weight = Scores<A>::template weight<kMarked>(load<A>(row + j), largest, A(1));
      sum += weight;
      count = weight == A(0) ? count : count + A(1);
      store(row + j, weight);
    }
    store(total_ + r * kWidth<A>, sum);
    store(count_ + r * kWidth<A>, count);
  }

  void add_values(const RowTile& t, int64_t tile, const Band& band) {
    const int64_t first = scores_.packed_key(p_.value, t) * p_.value.padded_rows + tile * kAttentionKeys;
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
    product.a_band = band;
    multiply<Into::kKeepAndAdd>(product, keep_);
    if (scores_.has(p_.value, scores_.key_slice(t), kAttentionNonFinite)) {
      add_non_finite(p_.value.non_finite + first, product, weights_, p_.value_depth,
                     [&](int64_t k) { return original(t, tile * kAttentionKeys + k); });
    }
  }

  // A row of V as it was given, in the units of the packed rows.
  const A* original(const RowTile& t, int64_t key) {
    const A factor = power_of_two<A>(-p_.value.exponents[scores_.packed_key(p_.value, t)]);
    read_row(args_.value, t.batch, t.head / (p_.heads / p_.kv_heads), key, p_.value_depth, factor, value_row_);
    return value_row_;
  }

  void finish(const RowTile& t) {
    const int64_t first = scores_.query_slice(t) * p_.queries + t.row, slice = scores_.packed_key(p_.value, t);
    const int64_t stats_row = kAttentionStats + p_.value_depth;
    const int exponent = p_.value.exponents[slice];
    const bool at_limit = exponent > 0 && p_.dropout_p == 0;
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int64_t r = 0; r < t.rows; ++r) {
        A* sums = sums_ + r * columns_;
        A* stats = static_cast<A*>(args_.stats) + (first + r) * stats_row;
        const A total = row_total<A>(load<A>(total_ + r * kWidth<A>));
        stats[0] = largest_[r];
        stats[1] = total == 0 ? A(0) : 1 / total;
        for (int64_t i = 0; i < columns_; i += kWidth<A>) {
          store(sums + i, load<A>(sums + i) * stats[1]);
        }
        stats[1] = row_total<A>(load<A>(count_ + r * kWidth<A>)) == 1 ? -stats[1] : stats[1];
        if (at_limit) {
          clamp(sums, static_cast<const A*>(p_.value.largest)[slice]);
        }
        write_row(stats + kAttentionStats, sums, p_.value_depth, A(1), 0);
        write_row(static_cast<T*>(args_.output) + (first + r) * p_.value_depth, sums, p_.value_depth, A(1), exponent);
        static_cast<A*>(args_.lse)[first + r] = log_sum(largest_[r], total);
      }
    });
  }

  static A log_sum(A largest, A total) {
    const double sum = total == 0                 ? 0.0
                       : std::is_same_v<A, float> ? static_cast<double>(__builtin_logf(static_cast<float>(total)))
                                                  : __builtin_log(static_cast<double>(total));
    return static_cast<A>(static_cast<double>(largest) * 4 + sum);
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
  A largest_[kAttentionRows], keep_[kAttentionRows];
  A total_[kAttentionRows * kWidth<A>], count_[kAttentionRows * kWidth<A>];  // of each row, in lanes
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
