// Products of small matrices from packed buffers: C = A B, or C = keep * C + A B, one register block at a time.
//
// Each element of C is a sum over k in order, whatever the block it falls in: chains of kChain fused multiply-adds,
// added up, then added to C. So its bits depend neither on the other rows nor on the number of columns (F5), and its
// error grows with the square root of kChain, not of the depth. Rows and columns are rounded up to whole blocks; what
// the padding holds reaches only padding.
#pragma once
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBlockRows = 6, kBlockVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kBlockRows = 4, kBlockVectors = 2;  // 8 of 16
#endif

constexpr int64_t kChain = 16;

template <class A>
struct Product {
  const A* a;  // element (row, k) at a[row * a_row + k * a_k]
  int64_t a_row, a_k;
  const A* b;  // [k, columns], rows b_row apart
  int64_t b_row;
  A* c;  // [rows, columns], rows c_row apart
  int64_t c_row;
  int64_t rows, depth, columns;
};

enum class Into { kOverwrite, kAdd, kKeepAndAdd };

template <class A, Into kInto, int kVectors>
ALLFINITE_INLINE void product_block(const Product<A>& p, int64_t row, int64_t column, const A* keep) {
  constexpr int w = kWidth<A>;
  Vec<A> total[kBlockRows][kVectors] = {};
  const A* a = p.a + row * p.a_row;
  const A* b = p.b + column;
  for (int64_t start = 0; start < p.depth; start += kChain) {
    const int64_t stop = start + kChain < p.depth ? start + kChain : p.depth;
    Vec<A> sum[kBlockRows][kVectors] = {};
    for (int64_t k = start; k < stop; ++k, a += p.a_k, b += p.b_row) {
      Vec<A> right[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        right[v] = load<A>(b + v * w);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kBlockRows; ++r) {
        const Vec<A> left = splat(a[r * p.a_row]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          sum[r][v] = fma(left, right[v], sum[r][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        total[r][v] += sum[r][v];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
    A* c = p.c + (row + r) * p.c_row + column;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kInto == Into::kOverwrite) {
        store(c + v * w, total[r][v]);
      } else if constexpr (kInto == Into::kAdd) {
        store(c + v * w, load<A>(c + v * w) + total[r][v]);
      } else {
        store(c + v * w, fma(load<A>(c + v * w), splat(keep[row + r]), total[r][v]));
      }
    }
  }
}

template <class A, Into kInto, int kVectors>
__attribute__((noinline)) void product_columns(const Product<A>& p, int64_t column, const A* keep) {
  for (int64_t row = 0; row < p.rows; row += kBlockRows) {
    product_block<A, kInto, kVectors>(p, row, column, keep);
  }
}

// keep: one factor a row, with Into::kKeepAndAdd only.
template <Into kInto, class A>
void multiply(const Product<A>& p, const A* keep = nullptr) {
  constexpr int64_t w = kWidth<A>;
  int64_t column = 0;
  for (; column + kBlockVectors * w <= p.columns; column += kBlockVectors * w) {
    product_columns<A, kInto, kBlockVectors>(p, column, keep);
  }
  for (; column < p.columns; column += w) {
    product_columns<A, kInto, 1>(p, column, keep);
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
