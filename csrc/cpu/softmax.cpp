// Softmax forward: y = exp(scale * x + bias - largest) / sum, row by row (softmax_row.h: the scores).
//
// Bytes: x read and y written once in memory, 2 b per element, and the mask; 16-bit rows leave 16 a row for backward.
// The exponentials of a row are kept in L1 (fp32, fp64: in y itself). Floor: copy bandwidth out of cache, in cache
// about 16 vector instructions for 16 elements (AVX-512), 9 (16 bits) or 12 of them exp. Left after measurement (one
// thread of a 2-core Xeon with AVX-512): 256 x 768 in cache takes 0.33 ns an element in fp16, 0.37 in bf16, 0.35 in
// fp32, half of it exp. Over another dimension than the last (768 of 768 x 4096, out of L2) 0.9 and 1.2 ns, for the
// tiles (softmax_tile.h), whose rows lie on as many pages. A float bias adds 0.2 ns to fp32 rows for its scores in
// double.
//
// Accumulation: fp32 (fp64) weights, added in chains of 8 vectors, the chains in double (row_sum.h). A row in which
// nothing takes part is 0. A NaN or +inf that takes part makes the row NaN, but for what is masked: that is 0.
#include "cpu/softmax.h"

#include "cpu/row_sum.h"
#include "cpu/softmax_row.h"
#include "cpu/softmax_tile.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 2;

// The weights of a row into `weights`; returns their sum.
template <class Row, class A, class Top>
ALLFINITE_INLINE double weigh(const Row& row, Top top, int64_t n, A* weights) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> total;
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> sum[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) {
      const Vec<A> e = row.weight(i, count, top);
      sum[u] += e;
      store_some(weights + i, e, count);
    };
    int64_t i = start;
    for (; i + kLanes * w <= stop; i += kLanes * w) {
      for (int u = 0; u < kLanes; ++u) {
        step(u, i + u * w, w);
      }
    }
    for (; i < stop; i += w) {
      step(0, i, stop - i < w ? stop - i : w);
    }
    total.add(sum[0] + sum[1]);
  }
  return total.total();
}

// y = weights * inverse.
template <class T, class A>
ALLFINITE_INLINE void divide(const A* weights, A inverse, T* y, int64_t n) {
  constexpr int w = kWidth<A>;
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    store_two(y + i, load<A>(weights + i) * inverse, load<A>(weights + i + w) * inverse);
  }
  for (; i < n; i += w) {
    const int64_t count = n - i < w ? n - i : w;
    store_some(y + i, load_some<A>(weights + i, count) * inverse, count);
  }
}

template <class T, class Row>
void fill_with_nan(const Row& row, T* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] = narrow<T>(row.masked(i) ? 0.0f : std::numeric_limits<float>::quiet_NaN());
  }
}

// One row; returns what backward needs of it.
template <class T, class Row, class Top>
ALLFINITE_INLINE SoftmaxRowNumbers finish_row(const Row& row, Top top, T* y, int64_t n, void* scratch) {
  using A = Accumulate<T>;
  if (row.empty(top)) {
    __builtin_memset(y, 0, static_cast<size_t>(n) * sizeof(T));
    return {0, 0};
  }
  A* weights = nullptr;
  if constexpr (std::is_same_v<T, A>) {
    weights = y;
  } else {
    weights = static_cast<A*>(scratch);
  }
  const double sum = weigh(row, top, n, weights);
  if (!__builtin_isfinite(sum)) {
    fill_with_nan(row, y, n);
    return {0, std::numeric_limits<double>::quiet_NaN()};
  }
  const A inverse = static_cast<A>(1 / sum);
  divide(weights, inverse, y, n);
  return {static_cast<double>(top), static_cast<double>(inverse)};
}

template <class T, Product kProduct>
void forward_rows(const SoftmaxForwardArgs& a) {
  using A = Accumulate<T>;
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  const Scale<A> scale(a.scale);
  MaskRows<A> mask(a.mask, static_cast<A*>(scratch_part(a.scratch, a.n, 1)), a.n);
  const auto one = [&](int64_t r, const T* row_x, T* row_y) {
    with_top<T, kProduct>(row_x, mask.row(r), a.n, scale, [&](const auto& row, auto top) {
      const SoftmaxRowNumbers numbers = finish_row(row, top, row_y, a.n, a.scratch);
      if (a.numbers) {
        a.numbers[r] = numbers;
      }
    });
  };
  if (a.inner == 1) {
    for (int64_t r = a.begin; r < a.end; ++r) {
      one(r, x + r * a.n, y + r * a.n);
    }
    return;
  }
  T *xs = tile_part<T>(a.tiles, a.n, 0), *ys = tile_part<T>(a.tiles, a.n, 1);
  for (int64_t t = a.begin; t < a.end; ++t) {
    const ColumnTile tile(a.inner, a.n, sizeof(T), t);
    gather_columns(x + tile.offset, a.inner, a.n, tile.columns, xs);
    for (int64_t c = 0; c < tile.columns; ++c) {
      one(tile.first_row + c, xs + c * a.n, ys + c * a.n);
    }
    scatter_columns(ys, a.inner, a.n, tile.columns, y + tile.offset);
  }
}

}  // namespace

void softmax_forward(const SoftmaxForwardArgs& args) {
  visit_rows(args.dtype, args.scale, args.mask, [&](auto tag, auto product) {
    forward_rows<typename decltype(tag)::type, decltype(product)::value>(args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
