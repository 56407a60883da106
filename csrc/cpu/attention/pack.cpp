// Packing: a tensor widened to the accumulate type once, in rows (padded with zeros) and in transposed tiles of keys.
//
// Bytes: the source read once, 4 bytes (fp64: 8) written per element and form; 1 / keys of the attention's work. Floor:
// the loads and stores; a transposed square of 16 costs 64 shuffles beside them. Largest magnitudes and NaN are found
// as integers on the way (magnitudes order as their bits do), so the usual slice is read once; one that holds a row
// with a NaN, an infinity or an exponent is done again, row by row.
//
// NaN and infinity: a row that holds one is flagged and its row-major copy is zeros, so that the products can leave it
// out where it is masked (F2) and take it in one by one where it is not.
//
// Exponents: where the largest finite magnitude of a row (or slice) lies outside [2^-40, 2^40] (fp64: 2^-200, 2^200),
// the values are stored times the power of two that brings it to that bound; no product of three of them then leaves
// the range. fp16 never needs one.
#include "cpu/attention/attention.h"
#include "cpu/attention/row.h"
#include "cpu/attention/transpose.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Largest finite magnitude of n values.
template <class A, class T>
A largest_finite(const T* p, int64_t n) {
  constexpr int w = kWidth<A>;
  Vec<A> largest = {};
  const Vec<A> limit = splat(std::numeric_limits<A>::max());
  for (int64_t i = 0; i < n; i += w) {
    const Vec<A> v = abs(n - i < w ? load_partial<A>(p + i, n - i) : load<A>(p + i));
    largest = v > largest ? (v <= limit ? v : largest) : largest;
  }
  return max_lanes<A>(largest);
}

template <class A, class T>
class Packer {
 public:
  explicit Packer(const AttentionPackArgs& args) : args_(args), packed_(args.packed) {}

  void slice(int64_t index) {
    const int64_t batch = index / packed_.heads, head = index % packed_.heads;
    source_ = static_cast<const T*>(args_.source.data) + batch * args_.source.batch + head * args_.source.head;
    index_ = index - packed_.first;
    const int exponent = usual_rows() ? 0 : any_rows();
    if (packed_.transposed) {
      transpose(exponent);
    }
  }

 private:
  // Rows as they are, without exponents. Returns whether that was right: all is finite and in range.
  bool usual_rows() {
    using Bits = std::conditional_t<std::is_same_v<A, float>, int32_t, int64_t>;
    constexpr int w = kWidth<A>;
    // Ends of the range of magnitudes whose exponent is 0, one step within it.
    const A low = power_of_two<A>(-kExponentRange<A>), high = power_of_two<A>(kExponentRange<A> - 1);
    Vec<A> largest = {};
    for (int64_t row = 0; row < packed_.rows; ++row) {
      const T* from = source_ + row * args_.source.row;
      A* to = row_at(row);
      Vec<A> of_row = {};
      const auto take = [&](int64_t i, Vec<A> v) __attribute__((always_inline)) {
        const Vec<A> magnitude = (Vec<A>)((Vec<Bits>)v & std::numeric_limits<Bits>::max());
        of_row = (Vec<A>)((Vec<Bits>)magnitude > (Vec<Bits>)of_row ? (Vec<Bits>)magnitude : (Vec<Bits>)of_row);
        if (to) {
          store(to + i, v);
        }
      };
      int64_t whole = 0;
      for (; whole + w <= packed_.columns; whole += w) {
        take(whole, load<A>(from + whole));
      }
      if (whole < packed_.columns) {
        take(whole, load_partial<A>(from + whole, packed_.columns - whole));
      }
      for (int64_t i = round_up(packed_.columns, w); to && i < packed_.padded_columns; i += w) {
        store(to + i, Vec<A>{});
      }
      if (any_lane(!(of_row <= high)) || (row_has_exponent() && !any_lane(of_row >= low))) {
        return false;
      }
      largest = max(of_row, largest);
    }
    return finish_usual(row_largest<A>(largest), low);
  }

  bool row_has_exponent() const { return packed_.per_row && !std::is_same_v<T, Half>; }

  bool finish_usual(A largest, A low) {
    if (!packed_.per_row) {
      if (largest < low && largest != 0) {
        return false;
      }
      static_cast<A*>(packed_.largest)[index_] = largest;
    }
    for (int64_t row = packed_.rows; row < packed_.padded_rows; ++row) {
      zero_row(row);
    }
    std::memset(packed_.non_finite + index_ * packed_.padded_rows, 0, packed_.padded_rows);
    const int64_t exponents = packed_.per_row ? packed_.padded_rows : 1;
    std::memset(packed_.exponents + index_ * exponents, 0, exponents * sizeof(int32_t));
    packed_.state[index_] = 0;
    return true;
  }

  // Rows of any values; returns the slice's exponent.
  int any_rows() {
    int exponent = 0;
    uint8_t state = 0;
    if (!packed_.per_row) {
      A largest = 0;
      for (int64_t row = 0; row < packed_.rows; ++row) {
        const A v = largest_finite<A>(source_ + row * args_.source.row, packed_.columns);
        largest = v > largest ? v : largest;
      }
      exponent = range_exponent(largest);
      packed_.exponents[index_] = exponent;
      static_cast<A*>(packed_.largest)[index_] = largest * power_of_two<A>(-exponent);
    }
    for (int64_t row = 0; row < packed_.padded_rows; ++row) {
      if (packed_.per_row) {
        exponent = row_exponent(row);
        packed_.exponents[index_ * packed_.padded_rows + row] = exponent;
      }
      const bool finite = row < packed_.rows ? one_row(row, exponent) : zero_row(row);
      packed_.non_finite[index_ * packed_.padded_rows + row] = !finite;
      state |= (finite ? 0 : kAttentionNonFinite) | (exponent == 0 ? 0 : kAttentionScaled);
    }
    packed_.state[index_] = state;
    return exponent;
  }

  int row_exponent(int64_t row) const {
    if (row >= packed_.rows || !row_has_exponent()) {
      return 0;
    }
    return range_exponent(largest_finite<A>(source_ + row * args_.source.row, packed_.columns));
  }

  // Whether the row is finite.
  bool one_row(int64_t row, int exponent) {
    constexpr int w = kWidth<A>;
    const T* from = source_ + row * args_.source.row;
    A* to = row_at(row);
    const A factor = power_of_two<A>(-exponent);
    Vec<A> differences = {};  // x - x: 0, or NaN for NaN and infinity
    for (int64_t i = 0; i < packed_.columns; i += w) {
      const int64_t count = packed_.columns - i < w ? packed_.columns - i : w;
      const Vec<A> v = count < w ? load_partial<A>(from + i, count) : load<A>(from + i);
      differences += v - v;
      if (to) {
        store(to + i, v * factor);
      }
    }
    const bool finite = sum_lanes<A>(differences) == 0;
    if (to && !finite) {
      zero_row(row);
    }
    for (int64_t i = round_up(packed_.columns, w); to && finite && i < packed_.padded_columns; ++i) {
      to[i] = 0;
    }
    return finite;
  }

  bool zero_row(int64_t row) {
    A* to = row_at(row);
    for (int64_t i = 0; to && i < packed_.padded_columns; ++i) {
      to[i] = 0;
    }
    return true;
  }

  A* row_at(int64_t row) const {
    return packed_.row_major
               ? static_cast<A*>(packed_.row_major) + (index_ * packed_.padded_rows + row) * packed_.padded_columns
               : nullptr;
  }

  void transpose(int exponent) {
    constexpr int w = kWidth<A>;
    const int64_t width = packed_.tile_width, columns = packed_.columns;
    const int64_t tiles = (packed_.rows + kAttentionKeys - 1) / kAttentionKeys;
    const A factor = power_of_two<A>(-exponent);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      A* to = static_cast<A*>(packed_.transposed) + (index_ * tiles + tile) * columns * width;
      for (int64_t key = 0; key < width; key += w) {
        const int64_t row = tile * kAttentionKeys + key;
        for (int64_t i = 0; i < columns; i += w) {
          transpose_square<A>(source_ + row * args_.source.row + i, args_.source.row, packed_.rows - row, columns - i,
                              factor, to + i * width + key, width);
        }
      }
    }
  }

  const AttentionPackArgs& args_;
  const AttentionPacked& packed_;
  const T* source_ = nullptr;
  int64_t index_ = 0;
};

}  // namespace

void attention_pack(const AttentionPackArgs& args) {
  visit_dtype(args.source.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    Packer<Accumulate<T>, T> packer(args);
    for (int64_t slice = args.begin; slice < args.end; ++slice) {
      packer.slice(slice);
    }
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
