// LayerNorm backward. With g = dy * weight and xhat from the saved statistics:
//   dx = rstd * scale * (g - mean(g) - xhat * mean(g * xhat)),  dweight = sum over rows of dy * xhat,  dbias
//   = of dy.
//
// Bytes: dy and x read, dx written once in memory (the second pass over a row hits the cache): 3 b per
// element, and 16 n bytes a chunk of rows for the column sums. Floor: copy bandwidth.
//
// Row sums: short fp32 chains, chains in double (row_sum.h). Column sums: fp32 over at most kFlushRows rows, then
// double, so that the error does not grow with the number of rows (F3); one buffer a chunk, chunks added in
// order (F5).
//
// Range: where g leaves [2^-60, 2^60] the row is done with g times a power of two, made from the exponents of dy
// and weight apart; powers of two are taken back in the rounding to the dtype. The mantissas are those of the plain
// path, so the result stays linear in dy bit for bit (F4). Column sums that are not finite are done again in
// double. dx of a row with rstd = 0 is 0.
#include "cpu/layer_norm.h"
#include "cpu/row_sum.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kLanes = 2;
constexpr int64_t kFlushRows = 8;

template <class A>
struct RowSums {
  A mean_g, mean_g_xhat, largest_g;
};

template <class A, class T, class W>
struct Row {
  const T* dy;
  const T* x;
  const W* weight;
  const A* stats;  // mean_hi, mean_lo, rstd, scale
  int64_t n;
};

// dy * weight * 2^-exponent, without leaving the range on the way.
template <class A>
A scaled_product(A dy, A weight, int exponent) {
  int of_dy = 0, of_weight = 0;
  const double factor = __builtin_frexp(static_cast<double>(dy), &of_dy);
  const A product = static_cast<A>(factor * __builtin_frexp(static_cast<double>(weight), &of_weight));
  return static_cast<A>(__builtin_ldexp(static_cast<double>(product), of_dy + of_weight - exponent));
}

// dy, g = dy * weight and xhat of `count` elements; 0 in the other lanes. kRescued: g times 2^-exponent.
template <bool kRescued, class A, class T, class W>
ALLFINITE_INLINE void load_row(const Row<A, T, W>& row, int64_t i, int64_t count, int exponent, Vec<A>& dy, Vec<A>& g,
                               Vec<A>& xhat) {
  const bool full = count == kWidth<A>;
  const Vec<A> x = full ? load<A>(row.x + i) : load_partial<A>(row.x + i, count);
  dy = full ? load<A>(row.dy + i) : load_partial<A>(row.dy + i, count);
  xhat = ((x * row.stats[3] - row.stats[0]) - row.stats[1]) * row.stats[2];
  if (!full) {  // -mean * rstd may be infinite
    xhat = first_lanes(xhat, count);
  }
  if constexpr (kRescued) {
    g = Vec<A>{};
    for (int64_t k = 0; k < count; ++k) {
      g[k] = scaled_product<A>(dy[k], row.weight ? widen<A>(row.weight[i + k]) : A(1), exponent);
    }
  } else {
    g = row.weight ? dy * (full ? load<A>(row.weight + i) : load_partial<A>(row.weight + i, count)) : dy;
  }
}

// Means of g and g * xhat, the largest |g|; with kColumns also adds dy * xhat and dy to the column
// accumulators.
template <bool kRescued, bool kColumns, class A, class T, class W>
RowSums<A> sum_row(const Row<A, T, W>& row, int exponent, A* columns) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> total_g, total_gx;
  Vec<A> largest = {};
  for (int64_t start = 0; start < row.n; start += block) {
    const int64_t stop = start + block < row.n ? start + block : row.n;
    Vec<A> sum_g[kLanes] = {}, sum_gx[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) {
      Vec<A> dy, g, xhat;
      load_row<kRescued>(row, i, count, exponent, dy, g, xhat);
      sum_g[u] += g;
      sum_gx[u] = fma(g, xhat, sum_gx[u]);
      largest = max(largest, abs(g));
      if constexpr (kColumns) {
        A* weight_sum = columns + i;
        A* bias_sum = columns + row.n + i;
        if (count == w) {
          store(weight_sum, fma(dy, xhat, load<A>(weight_sum)));
          store(bias_sum, dy + load<A>(bias_sum));
        } else {
          store_partial(weight_sum, fma(dy, xhat, load_partial<A>(weight_sum, count)), count);
          store_partial(bias_sum, dy + load_partial<A>(bias_sum, count), count);
        }
      }
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
    total_g.add(sum_g[0] + sum_g[1]);
    total_gx.add(sum_gx[0] + sum_gx[1]);
  }
  const double n = static_cast<double>(row.n);
  return {static_cast<A>(total_g.total() / n), static_cast<A>(total_gx.total() / n), max_lanes<A>(largest)};
}

template <class A, class T>
bool all_zero(const T* p, int64_t n) {
  Vec<A> nonzero = {};
  for (int64_t i = 0; i < n; i += kWidth<A>) {
    nonzero = max(nonzero, abs(n - i < kWidth<A> ? load_partial<A>(p + i, n - i) : load<A>(p + i)));
  }
  return max_lanes<A>(nonzero) == 0;
}

// The exponent e for which the largest |dy * weight| * 2^-e is near 1; false where no product is finite and not 0.
template <class A, class T, class W>
bool rescue_exponent(const Row<A, T, W>& row, int& exponent) {
  if (all_zero<A>(row.dy, row.n) || (row.weight && all_zero<A>(row.weight, row.n))) {
    return false;  // rows of padding and of masked losses: often, so quickly
  }
  bool found = false;
  for (int64_t i = 0; i < row.n; ++i) {
    const double dy = widen<double>(row.dy[i]), weight = row.weight ? widen<double>(row.weight[i]) : 1;
    if (dy != 0 && weight != 0 && __builtin_isfinite(dy) && __builtin_isfinite(weight)) {
      int of_dy = 0, of_weight = 0;
      __builtin_frexp(dy, &of_dy);
      __builtin_frexp(weight, &of_weight);
      exponent = found && exponent > of_dy + of_weight ? exponent : of_dy + of_weight;
      found = true;
    }
  }
  return found;
}

template <bool kRescued, class A, class T, class W>
void input_gradient(const Row<A, T, W>& row, int exponent, const RowSums<A>& sums, T* dx) {
  constexpr int w = kWidth<A>;
  const A scale = row.stats[3];
  const bool plain = !kRescued && scale == 1;
  // Elsewhere mantissas are multiplied as in the plain path, and exponents added up, so that nothing leaves the range
  // before the rounding to T.
  int of_rstd = 0, of_scale = 1;
  A factor = row.stats[2];
  if (!plain) {
    factor = static_cast<A>(__builtin_frexp(static_cast<double>(factor), &of_rstd));
    __builtin_frexp(static_cast<double>(scale), &of_scale);  // a power of two: 0.5 * 2^of_scale
  }
  const int shift = exponent + of_rstd + of_scale - 1;
  for (int64_t i = 0; i < row.n; i += w) {
    const int64_t count = row.n - i < w ? row.n - i : w;
    Vec<A> dy, g, xhat;
    load_row<kRescued>(row, i, count, exponent, dy, g, xhat);
    const Vec<A> d = fma(xhat, splat(-sums.mean_g_xhat), g - sums.mean_g) * factor;
    if (plain && count == w) {
      store(dx + i, d);
    } else if (plain) {
      store_partial(dx + i, d, count);
    } else {
      for (int64_t k = 0; k < count; ++k) {
        dx[i + k] = narrow<T>(__builtin_ldexp(static_cast<double>(d[k]), shift));
      }
    }
  }
}

template <class A, class T, class W>
void backward_row(const Row<A, T, W>& row, T* dx, A* columns) {
  RowSums<A> sums = columns ? sum_row<false, true>(row, 0, columns) : sum_row<false, false>(row, 0, columns);
  if (!dx) {
    return;
  }
  if (row.stats[2] == 0) {
    A nothing = 0;  // or NaN, if anything that takes part is not finite (F2)
    for (int64_t i = 0; i < row.n; ++i) {
      nothing += widen<A>(row.dy[i]) * A(0) + (row.weight ? widen<A>(row.weight[i]) * A(0) : A(0));
    }
    for (int64_t i = 0; i < row.n; ++i) {
      dx[i] = narrow<T>(nothing);
    }
    return;
  }
  constexpr A kLargest = std::is_same_v<A, float> ? A(0x1p60f) : A(0x1p480);
  const bool in_range = sums.largest_g <= kLargest && sums.largest_g >= 1 / kLargest;
  int exponent = 0;
  if (!in_range && rescue_exponent(row, exponent)) {
    sums = sum_row<true, false>(row, exponent, columns);
    input_gradient<true>(row, exponent, sums, dx);
  } else {
    input_gradient<false>(row, 0, sums, dx);
  }
}

template <class A>
void flush_columns(A* columns, double* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    sums[i] += static_cast<double>(columns[i]);
    columns[i] = 0;
  }
}

template <class T, class W>
Row<Accumulate<T>, T, W> row_at(const LayerNormBackwardArgs& a, int64_t row) {
  return {static_cast<const T*>(a.dy) + row * a.n, static_cast<const T*>(a.x) + row * a.n,
          static_cast<const W*>(a.weight), static_cast<const Accumulate<T>*>(a.stats) + row * kLayerNormStats, a.n};
}

template <class T, class W>
void backward_rows(const LayerNormBackwardArgs& a) {
  using A = Accumulate<T>;
  A* columns = a.sums ? static_cast<A*>(a.scratch) : nullptr;
  for (int64_t i = 0; columns && i < 2 * a.n; ++i) {
    columns[i] = 0;
    a.sums[i] = 0;
  }
  for (int64_t row = a.begin; row < a.end; ++row) {
    backward_row(row_at<T, W>(a, row), a.dx ? static_cast<T*>(a.dx) + row * a.n : nullptr, columns);
    if (columns && ((row - a.begin + 1) % kFlushRows == 0 || row + 1 == a.end)) {
      flush_columns(columns, a.sums, 2 * a.n);
    }
  }
}

// One column's sum in double, row by row: for columns whose fp32 sums left the range.
template <class T, class W>
double exact_column(const LayerNormBackwardArgs& a, int64_t column, bool of_weight) {
  double total = 0;
  for (int64_t r = a.begin; r < a.end; ++r) {
    const auto row = row_at<T, W>(a, r);
    const double dy = widen<double>(row.dy[column]);
    const double centred =
        (widen<double>(row.x[column]) * static_cast<double>(row.stats[3]) - static_cast<double>(row.stats[0])) -
        static_cast<double>(row.stats[1]);
    total += of_weight ? dy * (centred * static_cast<double>(row.stats[2])) : dy;
  }
  return total;
}

template <class T, class W, class G>
void write_columns(const LayerNormColumnsArgs& a, int64_t which, G* out) {
  for (int64_t i = 0; i < a.rows.n; ++i) {
    double total = 0;
    for (int64_t c = 0; c < a.chunks; ++c) {
      total += a.sums[(c * 2 + which) * a.rows.n + i];
    }
    if (!__builtin_isfinite(total)) {
      total = exact_column<T, W>(a.rows, i, which == 0);
    }
    out[i] = narrow<G>(total);
  }
}

}  // namespace

void layer_norm_backward(const LayerNormBackwardArgs& args) {
  visit_with_weight(args.dtype, args.weight_dtype, [&](auto t, auto w) {
    backward_rows<typename decltype(t)::type, typename decltype(w)::type>(args);
  });
}

void layer_norm_columns(const LayerNormColumnsArgs& args) {
  visit_dtype(args.rows.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const auto write = [&](int64_t which, void* out, DType dtype) {
      if (out) {
        visit_dtype(dtype, [&](auto g) {
          using G = typename decltype(g)::type;
          write_columns<T, T>(args, which, static_cast<G*>(out));
        });
      }
    };
    write(0, args.dweight, args.dweight_dtype);
    write(1, args.dbias, args.dbias_dtype);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
