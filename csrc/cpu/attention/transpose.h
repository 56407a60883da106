// A square of as many rows as a vector has lanes, transposed in registers: log2 of that many rounds of shuffles.
#pragma once
#include <utility>

#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// Lanes of a pair of rows that are kStep apart after one round: blocks of kStep lanes change places across the
// diagonal.
template <int kStep, bool kUpper, class V, int... kLane>
ALLFINITE_INLINE V exchange(V a, V b, std::integer_sequence<int, kLane...>) {
  constexpr int n = sizeof...(kLane);
  constexpr int shift = kUpper ? kStep : 0;
  return __builtin_shufflevector(a, b, (kLane & kStep ? n + kLane - kStep + shift : kLane + shift)...);
}

template <class A, int kStep>
ALLFINITE_INLINE void transpose_round(Vec<A>* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth<A>>{};
#pragma GCC unroll 16
  for (int i = 0; i < kWidth<A>; ++i) {
    if ((i & kStep) == 0) {
      const Vec<A> a = rows[i], b = rows[i + kStep];
      rows[i] = exchange<kStep, false>(a, b, lanes);
      rows[i + kStep] = exchange<kStep, true>(a, b, lanes);
    }
  }
  if constexpr (kStep > 1) {
    transpose_round<A, kStep / 2>(rows);
  }
}

// to[column][row] = from[row][column] * factor; of the square, `rows` and `columns` exist: others are read as zeros,
// and columns that do not exist are not written.
template <class A, class T>
ALLFINITE_INLINE void transpose_square(const T* from, int64_t from_row, int64_t rows, int64_t columns, A factor, A* to,
                                       int64_t to_row) {
  constexpr int w = kWidth<A>;
  Vec<A> square[w];
  if (rows >= w && columns >= w) {
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) {
      square[i] = load<A>(from + i * from_row) * factor;
    }
  } else {
    for (int i = 0; i < w; ++i) {
      const int64_t count = i >= rows ? 0 : columns < w ? columns : w;
      square[i] = (count < w ? load_partial<A>(from + i * from_row, count) : load<A>(from + i * from_row)) * factor;
    }
  }
  transpose_round<A, w / 2>(square);
  if (columns >= w) {
#pragma GCC unroll 16
    for (int i = 0; i < w; ++i) {
      store(to + i * to_row, square[i]);
    }
  } else {
    for (int i = 0; i < columns; ++i) {
      store(to + i * to_row, square[i]);
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
