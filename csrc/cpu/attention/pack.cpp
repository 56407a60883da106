// Packing: a tensor widened to the accumulate type once, in rows (padded with zeros) and in transposed tiles of keys.
//
// Bytes: the source read once (twice where exponents are needed), 4 bytes (fp64: 8) written per element and form; 1 /
// keys of the attention's work. NaN and infinity: a row that holds one is flagged and its row-major copy is zeros, so
// that the products can leave it out where it is masked (F2) and take it in one by one where it is not.
//
// Exponents: where the largest finite magnitude of a row (or slice) lies outside [2^-40, 2^40] (fp64: 2^-200, 2^200),
// the values are stored times the power of two that brings it to that bound; no product of three of them then leaves
// the range. fp16 never needs one.
#include "cpu/attention/attention.h"
#include "cpu/attention/row.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
constexpr int kExponentRange = std::is_same_v<A, float> ? 40 : 200;

template <class A>
int range_exponent(A largest) {
  int exponent = 0;
  __builtin_frexp(static_cast<double>(largest), &exponent);
  constexpr int kRange = kExponentRange<A>;
  return largest == 0 ? 0 : exponent > kRange ? exponent - kRange : exponent < -kRange ? exponent + kRange : 0;
}

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
    int exponent = 0;
    if (!packed_.per_row) {
      A largest = 0;
      for (int64_t row = 0; row < packed_.rows; ++row) {
        const A v = largest_finite<A>(source_ + row * args_.source.row, packed_.columns);
        largest = v > largest ? v : largest;
      }
      exponent = range_exponent(largest);
      packed_.exponents[index] = exponent;
      static_cast<A*>(packed_.largest)[index] = largest * power_of_two<A>(-exponent);
    }
    for (int64_t row = 0; row < packed_.padded_rows; ++row) {
      if (packed_.per_row) {
        exponent = row_exponent(index, row);
        packed_.exponents[index * packed_.padded_rows + row] = exponent;
      }
      const bool finite = row < packed_.rows ? one_row(index, row, exponent) : zero_row(index, row);
      packed_.non_finite[index * packed_.padded_rows + row] = !finite;
    }
    if (packed_.transposed) {
      transpose(index, exponent);
    }
  }

 private:
  int row_exponent(int64_t index, int64_t row) const {
    if (row >= packed_.rows || (std::is_same_v<T, Half> && !args_.beside)) {
      return 0;
    }
    A largest = largest_finite<A>(source_ + row * args_.source.row, packed_.columns);
    if (args_.beside) {
      const A v = largest_finite<A>(static_cast<const A*>(args_.beside) + index * packed_.rows + row, 1);
      largest = v > largest ? v : largest;
    }
    return range_exponent(largest);
  }

  // Whether the row is finite.
  bool one_row(int64_t index, int64_t row, int exponent) {
    constexpr int w = kWidth<A>;
    const T* from = source_ + row * args_.source.row;
    A* to = row_at(index, row);
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
      zero_row(index, row);
    }
    for (int64_t i = (packed_.columns + w - 1) / w * w; to && finite && i < packed_.padded_columns; ++i) {
      to[i] = 0;
    }
    return finite;
  }

  bool zero_row(int64_t index, int64_t row) {
    A* to = row_at(index, row);
    for (int64_t i = 0; to && i < packed_.padded_columns; ++i) {
      to[i] = 0;
    }
    return true;
  }

  A* row_at(int64_t index, int64_t row) const {
    return packed_.row_major
               ? static_cast<A*>(packed_.row_major) + (index * packed_.padded_rows + row) * packed_.padded_columns
               : nullptr;
  }

  void transpose(int64_t index, int exponent) {
    const int64_t width = packed_.tile_width, columns = packed_.columns;
    const int64_t tiles = (packed_.rows + kAttentionKeys - 1) / kAttentionKeys;
    const A factor = power_of_two<A>(-exponent);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      A* to = static_cast<A*>(packed_.transposed) + (index * tiles + tile) * columns * width;
      for (int64_t key = 0; key < width; key += kAttentionColumnAlign) {
        for (int64_t i = 0; i < columns; i += kAttentionColumnAlign) {
          transpose_square(tile * kAttentionKeys + key, i, factor, to + i * width + key);
        }
      }
    }
  }

  // 16 keys times 16 columns, so that whole cache lines are written; keys beyond the last are zeros.
  void transpose_square(int64_t row, int64_t column, A factor, A* to) {
    constexpr int64_t n = kAttentionColumnAlign;
    const int64_t columns = packed_.columns - column < n ? packed_.columns - column : n;
    A square[n][n];
    for (int64_t key = 0; key < n; ++key) {
      for (int64_t i = 0; i < n; i += kWidth<A>) {
        const T* from = source_ + (row + key) * args_.source.row + column + i;
        const int64_t count = row + key < packed_.rows ? columns - i : 0;
        store(square[key] + i, (count < kWidth<A> ? load_partial<A>(from, count) : load<A>(from)) * factor);
      }
    }
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t key = 0; key < n; ++key) {
        to[i * packed_.tile_width + key] = square[key][i];
      }
    }
  }

  const AttentionPackArgs& args_;
  const AttentionPacked& packed_;
  const T* source_ = nullptr;
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
