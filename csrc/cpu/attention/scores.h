// Scores of a tile of query rows against a tile of keys, and the weights they become: shared by forward and backward,
// so that both see the same bits.
//
// Scores are kept divided by 4: s / 4 + bias / 4 is finite for every finite bias, so a bias at the end of fp32's range
// neither masks nor becomes NaN (F1). Order: scale, softcap, bias, mask. A masked score is -inf, by selection; a score
// whose dot product is not finite becomes NaN, so that -inf always means masked and an overflow always shows (F2).
//
// Work beside the products: about 20 operations a score, against 2 D multiply-adds forward and 5 D with the backward.
// Where a window cuts the tile, only whole vectors and register blocks that a row sees are computed.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/gemm.h"
#include "cpu/attention/mask.h"
#include "cpu/attention/row.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Rows [row, row + rows) of one (batch, head).
struct RowTile {
  int64_t batch, head, row, rows;
};
struct KeyRange {
  int64_t begin, end;
};

// What is computed of one row of a tile: the whole vectors [begin, end), of which [first, last) takes part, mask aside.
// It covers what a register block can read, in rows or transposed, so that each row fills its part of a block.
struct Span {
  int64_t begin, end, first, last;
  bool cut() const { return first > begin || last < end; }
};

template <class A>
class Scores {
 public:
  explicit Scores(const AttentionProblem& problem) : p_(problem), usual_(problem.scale * 0.25, 0) {}

  const AttentionProblem& problem() const { return p_; }
  int64_t query_slice(const RowTile& t) const { return t.batch * p_.heads + t.head; }
  int64_t key_slice(const RowTile& t) const { return t.batch * p_.kv_heads + t.head / (p_.heads / p_.kv_heads); }
  // Where row `row` of the tile, or the key slice, is in a packed tensor.
  int64_t packed_row(const AttentionPacked& packed, const RowTile& t) const {
    return (query_slice(t) - packed.first) * packed.padded_rows + t.row;
  }
  int64_t packed_key(const AttentionPacked& packed, const RowTile& t) const { return key_slice(t) - packed.first; }

  // Keys that row i may see, mask aside.
  KeyRange visible(int64_t i) const {
    const int64_t begin = i > p_.left ? i - p_.left : 0;
    const int64_t end = p_.right > p_.keys - i - 1 ? p_.keys : larger(i + p_.right + 1, 0);
    return {smaller(begin, p_.keys), end};
  }
  // Tiles of keys that any row of the tile may see.
  KeyRange tiles(const RowTile& t) const {
    const KeyRange first = visible(t.row), last = visible(t.row + t.rows - 1);
    return {first.begin / kAttentionKeys,
            larger(first.begin, last.end) / kAttentionKeys + (larger(first.begin, last.end) % kAttentionKeys != 0)};
  }
  int64_t keys_in(int64_t tile) const { return smaller(p_.keys - tile * kAttentionKeys, kAttentionKeys); }

  // Key j of the tile takes part in row r of the tile, mask aside, where (r, j) is in this band.
  Band band(const RowTile& t, int64_t tile) const {
    const int64_t offset = t.row - tile * kAttentionKeys;
    return {offset - p_.left, offset + p_.right + 1};
  }
  Span span(const Band& band, int64_t r, int64_t keys) const {
    constexpr int64_t w = kWidth<A>, reach = kTallRows - 1;
    const int64_t block = r / kTallRows * kTallRows;
    const int64_t end = round_up(smaller(larger(block + band.high + 2 * reach, 0), keys), w);
    const int64_t begin = smaller(larger(block + band.low - reach, 0), end) / w * w;
    return {begin, end, smaller(larger(r + band.low, begin), end), smaller(larger(r + band.high, begin), keys)};
  }

  // rows of `left` (packed row-major, length `depth`) times the tile of `right` (packed transposed): out[row][key],
  // where it is in the band.
  void dot(const AttentionPacked& left, const AttentionPacked& right, const RowTile& t, int64_t tile, const Band& band,
           A* out, int64_t out_row) const {
    const int64_t tiles = round_up(right.rows, kAttentionKeys) / kAttentionKeys;
    const int64_t first = packed_row(left, t);
    Product<A> product{};
    product.a = static_cast<const A*>(left.row_major) + first * left.padded_columns;
    product.a_row = left.padded_columns;
    product.a_k = 1;
    product.b = static_cast<const A*>(right.transposed) +
                (packed_key(right, t) * tiles + tile) * right.columns * right.tile_width;
    product.b_row = right.tile_width;
    product.c = out;
    product.c_row = out_row;
    product.rows = t.rows;
    product.depth = right.columns;
    product.columns = round_up(keys_in(tile), kWidth<A>);
    product.c_band = band;
    multiply<Into::kOverwrite>(product);
    // Such a row was packed as zeros; with NaN or infinity in it, all is NaN.
    for (int64_t r = 0; has(left, query_slice(t), kAttentionNonFinite) && r < t.rows; ++r) {
      if (left.non_finite[first + r]) {
        fill(out + r * out_row, 0, product.columns, std::numeric_limits<A>::quiet_NaN());
      }
    }
  }

  static bool has(const AttentionPacked& packed, int64_t slice, uint8_t what) {
    return packed.state[slice - packed.first] & what;
  }

  // Dot products of row r to scores / 4, in place; returns the largest. slope (where softcap is on): the score's
  // derivative by the scaled dot product. buffer: kAttentionKeys.
  A row_scores(const RowTile& t, int64_t tile, int64_t r, const Span& span, A* row, A* slope, A* buffer) const {
    A largest = scale_any(t, r, row, span);
    if (p_.softcap > 0) {
      cap(row, slope, span);
    }
    if (p_.mask) {
      add_mask(p_, t.batch, t.head, t.row + r, tile * kAttentionKeys, keys_in(tile), span.begin, span.end, row, buffer);
    }
    if (span.cut()) {
      fill(row, span.begin, span.first, kMasked);
      fill(row, span.last, span.end, kMasked);
    }
    if (p_.softcap > 0 || p_.mask || span.cut()) {
      largest = row_max(row, span);
    }
    return largest;
  }
  bool may_mask(const Span& span) const { return p_.mask || span.cut(); }

  // Calls use(j, scores / 4) for each vector [j, j + width) of row r: what row_scores would store, but in registers,
  // one pass over the row. Only where `simple(t)`; the bits are those of row_scores.
  template <class Use>
  ALLFINITE_INLINE void each_score(const RowTile& t, int64_t tile, int64_t r, const Span& span, const A* row,
                                   Use use) const {
    const int64_t offset = p_.mask ? mask_offset(p_, t.batch, t.head, t.row + r, tile * kAttentionKeys) : 0;
    const int64_t keys = keys_in(tile);
    if (!p_.mask) {
      scaled(span, row, [](int64_t, Vec<A> s) { return s; }, use);
    } else if (p_.mask_is_bool) {
      const uint8_t* mask = static_cast<const uint8_t*>(p_.mask) + offset;
      scaled(span, row, [&](int64_t j, Vec<A> s) { return select_bools<A>(mask + j, keys - j, s); }, use);
    } else {
      visit_dtype(p_.mask_dtype, [&](auto m) {
        using M = typename decltype(m)::type;
        if constexpr (!std::is_same_v<M, double> || std::is_same_v<A, double>) {
          const M* bias = static_cast<const M*>(p_.mask) + offset;
          const auto add = [&](int64_t j, Vec<A> s) {
            return plus_bias<A>(s, keys - j >= kWidth<A> ? load<A>(bias + j) : load_partial<A>(bias + j, keys - j));
          };
          scaled(span, row, add, use);
        }
      });
    }
  }
  // The usual case, where no dot product can be NaN or leave A's range on the way to a score: no softcap, no mask of
  // odd strides, no row of Q or K that is not finite or has an exponent.
  bool simple(const RowTile& t) const {
    const bool unit_stride = !p_.mask || p_.mask_stride[3] == 1;
    return unit_stride && p_.softcap <= 0 && bounded(t);
  }

  // Whether a bool mask leaves nothing of the tile for any of the rows (padding, blocks): then it is skipped.
  bool wholly_masked(const RowTile& t, int64_t tile) const {
    if (!p_.mask || !p_.mask_is_bool || p_.mask_stride[3] != 1) {
      return false;
    }
    const int64_t rows = p_.mask_stride[2] == 0 ? 1 : t.rows, keys = keys_in(tile);
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* mask =
          static_cast<const uint8_t*>(p_.mask) + mask_offset(p_, t.batch, t.head, t.row + r, tile * kAttentionKeys);
      uint8_t any = 0;
      for (int64_t j = 0; j < keys; ++j) {
        any |= mask[j];
      }
      if (any) {
        return false;
      }
    }
    return true;
  }

  // exp(score - largest) * factor of one vector of scores / 4. A masked weight is -0 if it is to be `marked`, so that
  // a NaN beside it stays out, else 0.
  template <bool kMarked>
  static ALLFINITE_INLINE Vec<A> weight(Vec<A> score, A largest, A factor) {
    const Vec<A> e = exp_of_quarters(score - largest) * factor;
    return kMarked ? (score == kMasked ? splat(A(-0.0)) : e) : e;
  }

  // row *= what dropout leaves of each weight.
  void drop(const RowTile& t, int64_t r, int64_t tile, const Span& span, A* row, A* buffer) const {
    dropout_factors(p_.seed, p_.dropout_p, t.batch, t.head, t.row + r, tile * kAttentionKeys + span.begin,
                    span.end - span.begin, buffer);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      store(row + j, load<A>(row + j) * load<A>(buffer + j - span.begin));
    }
  }

  static constexpr A kMasked = -std::numeric_limits<A>::infinity();

 private:
  // No score can leave A's range: packed values are below 2^40 (fp64: 2^200), their products below 2^80 and a sum of
  // them below 2^100.
  bool bounded(const RowTile& t) const {
    constexpr uint8_t odd = kAttentionScaled | kAttentionNonFinite;
    const bool small = p_.scale < 0x1p20 && p_.scale > -0x1p20 && p_.depth < (1 << 20);
    return small && usual_.second == 1 && !has(p_.query, query_slice(t), odd) && !has(p_.key, key_slice(t), odd);
  }
  template <class Mask, class Use>
  ALLFINITE_INLINE void scaled(const Span& span, const A* row, Mask mask, Use use) const {
    const bool cut = span.cut();
    const A scale = usual_.first;
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      Vec<A> s = mask(j, load<A>(row + j) * scale);
      if (cut) {
        s = lanes_within(s, span.first - j, span.last - j, kMasked);
      }
      use(j, s);
    }
  }
  A scale_any(const RowTile& t, int64_t r, A* row, const Span& span) const {
    const int exponent = p_.key.exponents[packed_key(p_.key, t)] + p_.query.exponents[packed_row(p_.query, t) + r];
    const Factor<A> factor = exponent == 0 ? usual_ : Factor<A>(p_.scale * 0.25, exponent);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      const Vec<A> s = load<A>(row + j) * factor.first * factor.second;
      store(row + j, s + (s - s));
    }
    return row_max(row, span);
  }
  static A row_max(const A* row, const Span& span) {
    Vec<A> largest = splat(kMasked);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      largest = max(load<A>(row + j), largest);
    }
    return row_largest<A>(largest);
  }

  void cap(A* row, A* slope, const Span& span) const {
    // Within A's range, whatever was asked for: at these ends the cap is a step, or none.
    constexpr double kSmallest = std::is_same_v<A, float> ? 0x1p-126 : 0x1p-1022;
    constexpr double kLargest = std::is_same_v<A, float> ? 0x1p125 : 0x1p1020;
    const double quarter = p_.softcap * 0.25;
    const A cap = static_cast<A>(quarter < kSmallest ? kSmallest : quarter > kLargest ? kLargest : quarter);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      const Vec<A> u = tanh(load<A>(row + j) / cap);
      store(row + j, u * cap);
      if (slope) {
        store(slope + j, A(1) - u * u);
      }
    }
  }

  const AttentionProblem& p_;
  Factor<A> usual_;  // scale / 4
};

// A packed row of zeros stands for one that holds NaN or infinity. Adds what it gives, as it is, to the rows whose
// weight takes part: c[r] += weight * row, for each weight that is in the band and not masked.
// The weights are the product's A; marks has their layout and is -0 where a weight is masked.
template <class A, class Load>
void add_non_finite(const uint8_t* non_finite, const Product<A>& product, const A* marks, int64_t columns,
                    Load load_row) {
  for (int64_t k = 0; k < product.depth; ++k) {
    if (!non_finite[k]) {
      continue;
    }
    const A* original = load_row(k);
    for (int64_t r = 0; r < product.rows; ++r) {
      const int64_t at = r * product.a_row + k * product.a_k;
      const bool inside = r + product.a_band.low <= k && k < r + product.a_band.high;
      for (int64_t i = 0; inside && !is_masked(marks[at]) && i < columns; ++i) {
        product.c[r * product.c_row + i] += product.a[at] * original[i];
      }
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
