// Products of small matrices from packed buffers: C = A B, C += A B, or C = keep * C + A B, one register block at a
// time.
//
// Floor: the multiply-add rate. A block of 6 rows and 4 vectors (narrow matrices: 12 rows and 1 or 2) holds 24 sums in
// registers, against 4 loads and 6 broadcasts a step, so the multiply-adds set the pace; what is left is reading and
// writing C once a block, 1 / depth of the work. Measured on a 2-core Xeon with AVX-512: 88 to 95 % of the peak for
// the sizes of attention.
//
// Each element of C is a sum over k in order, whatever the block it falls in: chains of kChain fused multiply-adds,
// each added to C. So its bits depend neither on the other rows nor on the number of columns (F5). Rows are rounded up
// to a multiple of kBlockRows, columns to whole vectors; what the padding holds reaches only padding, but it should
// hold zeros: a subnormal left over there costs some hundred cycles a multiply-add. Terms outside of a band are left
// out: they would add zeros.
#pragma once
#include "cpu/simd.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBlockVectors = 4;  // 24 of 32 registers accumulate
#else
constexpr int kBlockVectors = 2;  // 12 of 16
#endif
constexpr int kBlockRows = 6;
constexpr int kTallRows = 12;  // of blocks that are narrower than that; a multiple of kBlockRows

constexpr int64_t kChain = 32;

// Element (row, k) of a matrix is in the band if row + low <= k < row + high.
struct Band {
  int64_t low = -(int64_t{1} << 61), high = int64_t{1} << 61;
};

template <class A>
struct Product {
  const A* a;  // element (row, k) at a[row * a_row + k * a_k]
  int64_t a_row, a_k;
  const A* b;  // [k, columns], rows b_row apart
  int64_t b_row;
  A* c;  // [rows, columns], rows c_row apart
  int64_t c_row;
  int64_t rows, depth, columns;
  Band a_band;  // A is zero outside of it
  Band c_band;  // C is not wanted outside of it
};

enum class Into { kOverwrite, kAdd, kKeepAndAdd };

template <class A, Into kInto, int kRows, int kVectors>
ALLFINITE_INLINE void store_block(const Vec<A> (&sum)[kRows][kVectors], A* c, int64_t c_row, const A* keep) {
  constexpr int w = kWidth<A>;
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r, c += c_row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kInto == Into::kOverwrite) {
        store(c + v * w, sum[r][v]);
      } else if constexpr (kInto == Into::kAdd) {
        store(c + v * w, load<A>(c + v * w) + sum[r][v]);
      } else {
        store(c + v * w, fma(load<A>(c + v * w), splat(keep[r]), sum[r][v]));
      }
    }
  }
}

// One chain of a block: the terms from `begin` to `end`.
template <class A, Into kInto, int kRows, int kVectors>
ALLFINITE_INLINE void chain(const Product<A>& p, int64_t row, int64_t column, int64_t begin, int64_t end,
                            const A* keep) {
  constexpr int w = kWidth<A>;
  const A* a = p.a + row * p.a_row + begin * p.a_k;
  const A* b = p.b + begin * p.b_row + column;
  Vec<A> sum[kRows][kVectors] = {};
  for (int64_t k = begin; k < end; ++k, a += p.a_k, b += p.b_row) {
    Vec<A> right[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      right[v] = load<A>(b + v * w);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> left = splat(a[r * p.a_row]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = fma(left, right[v], sum[r][v]);
      }
    }
  }
  store_block<A, kInto, kRows, kVectors>(sum, p.c + row * p.c_row + column, p.c_row, keep + row);
}

template <class A, Into kInto, int kRows, int kVectors>
ALLFINITE_INLINE void block(const Product<A>& p, int64_t row, int64_t column, const A* keep) {
  const int64_t last = row + kRows - 1;
  if (column + kVectors * kWidth<A> <= row + p.c_band.low || column >= last + p.c_band.high) {
    return;
  }
  const int64_t begin = row + p.a_band.low > 0 ? row + p.a_band.low : 0;
  const int64_t end = last + p.a_band.high < p.depth ? last + p.a_band.high : p.depth;
  int64_t stop = (begin / kChain + 1) * kChain;
  chain<A, kInto, kRows, kVectors>(p, row, column, begin, stop < end ? stop : end, keep);
  for (; stop < end; stop += kChain) {
    chain<A, Into::kAdd, kRows, kVectors>(p, row, column, stop, stop + kChain < end ? stop + kChain : end, keep);
  }
}

template <class A, Into kInto, int kRows, int kVectors>
__attribute__((noinline)) void product_columns(const Product<A>& p, int64_t column, const A* keep) {
  int64_t row = 0;
  for (; row + kRows - kBlockRows < p.rows; row += kRows) {
    block<A, kInto, kRows, kVectors>(p, row, column, keep);
  }
  if (row < p.rows) {
    block<A, kInto, kBlockRows, kVectors>(p, row, column, keep);
  }
}

// keep: one factor a row, with Into::kKeepAndAdd only.
template <Into kInto, class A>
void multiply(const Product<A>& p, const A* keep = nullptr) {
  constexpr int64_t w = kWidth<A>;
  int64_t column = 0;
  for (; column + kBlockVectors * w <= p.columns; column += kBlockVectors * w) {
    product_columns<A, kInto, kBlockRows, kBlockVectors>(p, column, keep);
  }
  const int64_t left = (p.columns - column + w - 1) / w;
  if constexpr (kBlockVectors == 4) {
    if (left == 3) {
      return product_columns<A, kInto, kBlockRows, 3>(p, column, keep);
    }
    if (left == 2) {
      return product_columns<A, kInto, kTallRows, 2>(p, column, keep);
    }
  }
  if (left == 1) {
    product_columns<A, kInto, kTallRows, 1>(p, column, keep);
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
