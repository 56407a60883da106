// Rows whose elements do not lie side by side (a softmax over any dimension but the last): neighbouring columns are
// brought to a tile of contiguous rows in cache, and back.
//
// Bytes: each element read and written once in memory, in whole cache lines; the tile stays in L2. Blocks of one vector
// by one vector are transposed in registers: log2(width) shuffles a vector, 4 for 16 floats or 32 numbers of 16 bits,
// which travel as pairs. What is less than a block is moved one by one. Values are moved as bits.
#pragma once
#include "cpu/simd.h"
#include "cpu/softmax.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Tile number `index` of rows of n elements, `inner` apart.
struct ColumnTile {
  ColumnTile(int64_t inner, int64_t n, int64_t element_size, int64_t index) {
    const int64_t width = softmax_tile_columns(n, element_size), per_block = (inner + width - 1) / width;
    const int64_t block = index / per_block, column = index % per_block * width;
    first_row = block * inner + column;
    offset = block * inner * n + column;
    columns = inner - column < width ? inner - column : width;
  }
  int64_t first_row, offset, columns;  // offset: of the first element
};

// One of the tiles' parts of the memory that is lent to a kernel.
template <class T>
T* tile_part(void* tiles, int64_t n, int part) {
  return reinterpret_cast<T*>(static_cast<char*>(tiles) + softmax_tile_bytes(n, sizeof(T)) * part);
}

// What is transposed: words of 32 bits (two numbers of 16 bits, one behind the other in their row) or 64.
template <class T>
using Word = std::conditional_t<sizeof(T) == 8, int64_t, uint32_t>;
template <class T>
constexpr int kPerWord = sizeof(T) == 2 ? 2 : 1;
template <class T>
constexpr int kBlock = kWidth<Word<T>>;

template <int kStep, class V, int... kLane>
ALLFINITE_INLINE void exchange(V& a, V& b, std::integer_sequence<int, kLane...>) {
  constexpr int width = sizeof...(kLane);
  const V first = __builtin_shufflevector(a, b, (kLane & kStep ? width + kLane - kStep : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane & kStep ? width + kLane : kLane + kStep)...);
  a = first;
}
// Square: as many vectors as a vector has lanes.
template <int kStep, int kCount, class V>
ALLFINITE_INLINE void transpose(V* v) {
  for (int i = 0; i < kCount; ++i) {
    if (!(i & kStep)) {
      exchange<kStep>(v[i], v[i + kStep], std::make_integer_sequence<int, kCount>{});
    }
  }
  if constexpr (kStep > 1) {
    transpose<kStep / 2, kCount>(v);
  }
}

// Words of kBlock<T> neighbouring columns.
template <class T>
ALLFINITE_INLINE Vec<Word<T>> load_words(const T* p, int64_t stride) {
  if constexpr (sizeof(T) == 2) {
    HalfWords low, high;
    std::memcpy(&low, p, sizeof low);
    std::memcpy(&high, p + stride, sizeof high);
    return __builtin_convertvector(low, Vec<uint32_t>) | __builtin_convertvector(high, Vec<uint32_t>) << 16;
  } else {
    Vec<Word<T>> words;
    std::memcpy(&words, p, sizeof words);
    return words;
  }
}
template <class T>
ALLFINITE_INLINE void store_words(T* p, int64_t stride, Vec<Word<T>> words) {
  if constexpr (sizeof(T) == 2) {
    const HalfWords low = __builtin_convertvector(words & 0xffffu, HalfWords);
    const HalfWords high = __builtin_convertvector(words >> 16, HalfWords);
    std::memcpy(p, &low, sizeof low);
    std::memcpy(p + stride, &high, sizeof high);
  } else {
    std::memcpy(p, &words, sizeof words);
  }
}

// Calls whole(i, c) for whole blocks, element i of column c first, and one(i, c) for every other element.
template <class T, class Whole, class One>
ALLFINITE_INLINE void for_blocks(int64_t n, int64_t columns, Whole whole, One one) {
  constexpr int64_t length = kBlock<T> * kPerWord<T>;
  const int64_t whole_columns = columns / kBlock<T> * kBlock<T>;
  int64_t i = 0;
  for (; i + length <= n; i += length) {
    for (int64_t c = 0; c < whole_columns; c += kBlock<T>) {
      whole(i, c);
    }
    for (int64_t k = i; k < i + length; ++k) {
      for (int64_t c = whole_columns; c < columns; ++c) {
        one(k, c);
      }
    }
  }
  for (; i < n; ++i) {
    for (int64_t c = 0; c < columns; ++c) {
      one(i, c);
    }
  }
}

// rows[c, i] = from[i * stride + c]
template <class T>
void gather_columns(const T* from, int64_t stride, int64_t n, int64_t columns, T* rows) {
  for_blocks<T>(
      n, columns,
      [&](int64_t i, int64_t c) __attribute__((always_inline)) {
        Vec<Word<T>> v[kBlock<T>];
        for (int k = 0; k < kBlock<T>; ++k) {
          v[k] = load_words(from + (i + k * kPerWord<T>)*stride + c, stride);
        }
        transpose<kBlock<T> / 2, kBlock<T>>(v);
        for (int k = 0; k < kBlock<T>; ++k) {
          std::memcpy(rows + (c + k) * n + i, &v[k], sizeof v[k]);
        }
      },
      [&](int64_t i, int64_t c) __attribute__((always_inline)) { rows[c * n + i] = from[i * stride + c]; });
}

// to[i * stride + c] = rows[c, i]
template <class T>
void scatter_columns(const T* rows, int64_t stride, int64_t n, int64_t columns, T* to) {
  for_blocks<T>(
      n, columns,
      [&](int64_t i, int64_t c) __attribute__((always_inline)) {
        Vec<Word<T>> v[kBlock<T>];
        for (int k = 0; k < kBlock<T>; ++k) {
          std::memcpy(&v[k], rows + (c + k) * n + i, sizeof v[k]);
        }
        transpose<kBlock<T> / 2, kBlock<T>>(v);
        for (int k = 0; k < kBlock<T>; ++k) {
          store_words(to + (i + k * kPerWord<T>)*stride + c, stride, v[k]);
        }
      },
      [&](int64_t i, int64_t c) __attribute__((always_inline)) { to[i * stride + c] = rows[c * n + i]; });
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
