// Scores of a tile of query rows against a tile of keys, and the weights they become: shared by forward and backward,
// so that both see the same bits.
//
// Scores are kept divided by 4: s / 4 + bias / 4 is finite for every finite bias, so a bias at the end of fp32's range
// neither masks nor becomes NaN (F1). Order: scale, softcap, bias, mask. A masked score is -inf, by selection; a score
// whose dot product is not finite becomes NaN, so that -inf always means masked and an overflow always shows (F2).
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/dropout.h"
#include "cpu/attention/gemm.h"
#include "cpu/attention/row.h"
#include "cpu/math.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
constexpr int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
constexpr int64_t larger(int64_t a, int64_t b) {
  return a < b ? b : a;
}

// Rows [row, row + rows) of one (batch, head).
struct RowTile {
  int64_t batch, head, row, rows;
};
struct KeyRange {
  int64_t begin, end;
};

template <class A>
class Scores {
 public:
  explicit Scores(const AttentionProblem& problem) : p_(problem) {}

  const AttentionProblem& problem() const { return p_; }
  int64_t query_slice(const RowTile& t) const { return t.batch * p_.heads + t.head; }
  int64_t key_slice(const RowTile& t) const { return t.batch * p_.kv_heads + t.head / (p_.heads / p_.kv_heads); }
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
  int64_t columns_in(int64_t tile) const { return round_up(keys_in(tile), kWidth<A>); }

  // rows of `left` (packed row-major, length `depth`) times the tile of `right` (packed transposed): out[row][key].
  void dot(const AttentionPacked& left, const AttentionPacked& right, const RowTile& t, int64_t tile, A* out,
           int64_t out_row) const {
    const int64_t tiles = round_up(right.rows, kAttentionKeys) / kAttentionKeys;
    const int64_t first = query_slice(t) * left.padded_rows + t.row;
    Product<A> product{};
    product.a = static_cast<const A*>(left.row_major) + first * left.padded_columns;
    product.a_row = left.padded_columns;
    product.a_k = 1;
    product.b =
        static_cast<const A*>(right.transposed) + (key_slice(t) * tiles + tile) * right.columns * right.tile_width;
    product.b_row = right.tile_width;
    product.c = out;
    product.c_row = out_row;
    product.rows = t.rows;
    product.depth = right.columns;
    product.columns = columns_in(tile);
    multiply<Into::kOverwrite>(product);
    for (int64_t r = 0; r < t.rows; ++r) {  // such a row was packed as zeros; with NaN or infinity in it, all is NaN
      if (left.non_finite[first + r]) {
        fill(out + r * out_row, 0, product.columns, std::numeric_limits<A>::quiet_NaN());
      }
    }
  }

  // scores[row][key] / 4; slope (where softcap is on): its derivative by the scaled dot product. buffer:
  // kAttentionKeys.
  void operator()(const RowTile& t, int64_t tile, A* scores, A* slope, int64_t out_row, A* buffer) const {
    dot(p_.query, p_.key, t, tile, scores, out_row);
    const int64_t first = tile * kAttentionKeys, columns = columns_in(tile);
    const int key_exponent = p_.key.exponents[key_slice(t)];
    const int32_t* exponents = p_.query.exponents + query_slice(t) * p_.query.padded_rows + t.row;
    const Factor<A> usual(p_.scale * 0.25, key_exponent);
    for (int64_t r = 0; r < t.rows; ++r) {
      A* row = scores + r * out_row;
      const Factor<A> factor = exponents[r] == 0 ? usual : Factor<A>(p_.scale * 0.25, key_exponent + exponents[r]);
      for (int64_t j = 0; j < columns; j += kWidth<A>) {
        const Vec<A> s = load<A>(row + j) * factor.first * factor.second;
        store(row + j, s + (s - s));
      }
      if (p_.softcap > 0) {
        cap(row, slope ? slope + r * out_row : nullptr, columns);
      }
      if (p_.mask) {
        add_mask(t, r, first, keys_in(tile), row, buffer);
      }
      const KeyRange keys = visible(t.row + r);
      fill(row, 0, smaller(larger(keys.begin - first, 0), columns), kMasked);
      fill(row, smaller(larger(keys.end - first, 0), columns), columns, kMasked);
    }
  }

  // Scores to exp(score - largest) * factor in place; returns their sum. A masked weight becomes -0.
  static A weigh(A* row, int64_t columns, A largest, A factor) {
    Vec<A> sum = {};
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      const Vec<A> s = load<A>(row + j);
      const Vec<A> e = exp((s - largest) * A(4)) * factor;
      const Vec<A> weight = s == kMasked ? splat(A(-0.0)) : e;
      sum += weight;
      store(row + j, weight);
    }
    return sum_lanes<A>(sum);
  }

  static A row_max(const A* row, int64_t columns) {
    Vec<A> largest = splat(kMasked);
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      largest = max(load<A>(row + j), largest);
    }
    return max_lanes<A>(largest);
  }

  // row *= what dropout leaves of each weight.
  void drop(const RowTile& t, int64_t r, int64_t tile, A* row, A* buffer) const {
    const int64_t columns = columns_in(tile);
    dropout_factors(p_.seed, p_.dropout_p, t.batch, t.head, t.row + r, tile * kAttentionKeys, columns, buffer);
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      store(row + j, load<A>(row + j) * load<A>(buffer + j));
    }
  }

 private:
  static constexpr A kMasked = -std::numeric_limits<A>::infinity();

  static void fill(A* row, int64_t begin, int64_t end, A value) {
    for (int64_t j = begin; j < end; ++j) {
      row[j] = value;
    }
  }

  void cap(A* row, A* slope, int64_t columns) const {
    // Within A's range, whatever was asked for: at these ends the cap is a step, or none.
    constexpr double kSmallest = std::is_same_v<A, float> ? 0x1p-126 : 0x1p-1022;
    constexpr double kLargest = std::is_same_v<A, float> ? 0x1p125 : 0x1p1020;
    const double quarter = p_.softcap * 0.25;
    const A cap = static_cast<A>(quarter < kSmallest ? kSmallest : quarter > kLargest ? kLargest : quarter);
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      const Vec<A> u = tanh(load<A>(row + j) / cap);
      store(row + j, u * cap);
      if (slope) {
        store(slope + j, A(1) - u * u);
      }
    }
  }

  void add_mask(const RowTile& t, int64_t r, int64_t first, int64_t n, A* row, A* bias) const {
    const int64_t stride = p_.mask_stride[3];
    const int64_t offset =
        t.batch * p_.mask_stride[0] + t.head * p_.mask_stride[1] + (t.row + r) * p_.mask_stride[2] + first * stride;
    if (p_.mask_is_bool) {
      const uint8_t* mask = static_cast<const uint8_t*>(p_.mask) + offset;
      for (int64_t j = 0; j < n; ++j) {
        row[j] = mask[j * stride] ? row[j] : kMasked;
      }
      return;
    }
    visit_dtype(p_.mask_dtype, [&](auto m) {
      using M = typename decltype(m)::type;
      const M* mask = static_cast<const M*>(p_.mask) + offset;
      for (int64_t j = 0; j < n; ++j) {
        bias[j] = widen<A>(mask[j * stride]);
      }
    });
    for (int64_t j = 0; j < n; ++j) {
      row[j] = bias[j] == kMasked ? kMasked : row[j] + A(0.25) * bias[j];
    }
  }

  const AttentionProblem& p_;
};

// A packed row of zeros stands for one that holds NaN or infinity. Adds what it gives, as it is, to the rows whose
// weight takes part: c[r] += weight * row, for each weight that is not masked.
//   weights: element (r, k) at weights[r * row_step + k * k_step]; marks: the same layout, masked where -0.
template <class A, class Load>
void add_non_finite(const uint8_t* non_finite, int64_t depth, const A* weights, const A* marks, int64_t row_step,
                    int64_t k_step, int64_t rows, A* c, int64_t c_row, int64_t columns, Load load_row) {
  for (int64_t k = 0; k < depth; ++k) {
    if (!non_finite[k]) {
      continue;
    }
    const A* original = load_row(k);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = r * row_step + k * k_step;
      if (!is_masked(marks[at])) {
        for (int64_t i = 0; i < columns; ++i) {
          c[r * c_row + i] += weights[at] * original[i];
        }
      }
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
