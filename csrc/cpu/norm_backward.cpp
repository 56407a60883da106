// Norm backward. With g = dy * weight and xhat from the saved statistics:
//   dx = rstd * scale * (g - mean(g) - xhat * mean(g * xhat)), plus dsum;  rms_norm: without mean(g);
//   dweight = sum over rows of dy * xhat,  dbias = of dy (norm_columns.cpp adds the chunks up).
//
// Bytes: dy and x read, dx written once in memory (further passes over a row hit the cache): 3 b per element, dsum one
// more, and 16 n bytes a chunk of rows for the column sums. Floor: copy bandwidth.
//
// Rows go in blocks: loads widen dy and write xhat (norm_row.h), one pass sums rows and columns, one writes. Row sums:
// short fp32 chains, chains in double (row_sum.h). Column sums: fp32 over at most kFlushRows rows, then double, so that
// the error does not grow with the number of rows (F3); one buffer a chunk, chunks added in order (F5).
//
// Range: where g leaves [2^-60, 2^60] the row is done with g times a power of two, made from the exponents of dy
// and weight apart (norm_rescue.h). dx of a row with rstd = 0 is dsum or 0.
#include "cpu/norm.h"
#include "cpu/norm_rescue.h"
#include "cpu/norm_row.h"
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

// Means of g and g * xhat, the largest |g|, where g is dy * weight, or dy without a weight; and adds dy * xhat and dy
// to the column accumulators, if there are any.
template <bool kMean, class A>
RowSums<A> sum_row(const A* dy, const A* xhat, const A* weight, int64_t n, A* columns) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  WideSum<A> total_g, total_gx;
  Vec<A> largest = {};
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> sum_g[kLanes] = {}, sum_gx[kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) {
      const Vec<A> d = load_lanes<A>(dy + i, count), xh = load_lanes<A>(xhat + i, count);
      const Vec<A> g = weight ? d * load_lanes<A>(weight + i, count) : d;
      sum_gx[u] = fma(g, xh, sum_gx[u]);
      largest = max(largest, abs(g));
      if constexpr (kMean) {
        sum_g[u] += g;
      }
      if (columns) {
        A* weight_sum = columns + i;
        A* bias_sum = columns + n + i;
        store_lanes(weight_sum, fma(d, xh, load_lanes<A>(weight_sum, count)), count);
        if constexpr (kMean) {
          store_lanes(bias_sum, d + load_lanes<A>(bias_sum, count), count);
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
  const double count = static_cast<double>(n);
  return {kMean ? static_cast<A>(total_g.total() / count) : A(0), static_cast<A>(total_gx.total() / count),
          max_lanes<A>(largest)};
}

// One row of what is written, and of the gradient that is added to it. T: of dx. X: of dsum and dresidual.
template <class T, class X>
struct Output {
  T* dx;
  X* dresidual;
  const X* dsum;
};

template <class A, class T, class X>
ALLFINITE_INLINE void write_vector(const Output<T, X>& out, int64_t i, int64_t count, Vec<A> d) {
  if (out.dsum) {
    d += load_lanes<A>(out.dsum + i, count);
  }
  if (out.dx) {
    store_lanes(out.dx + i, d, count);
  }
  if (out.dresidual) {
    store_lanes(out.dresidual + i, d, count);
  }
}

// g: times 2^-exponent.
template <class A, class T, class X>
void write_scaled(const A* g, const A* xhat, int64_t n, const RowSums<A>& sums, const RowStats<A>& s, int exponent,
                  const Output<T, X>& out) {
  int of_rstd = 0, of_scale = 0;
  const A factor = static_cast<A>(__builtin_frexp(static_cast<double>(s.rstd), &of_rstd));
  __builtin_frexp(static_cast<double>(s.scale), &of_scale);  // a power of two: 0.5 * 2^of_scale
  const int shift = exponent + of_rstd + of_scale - 1;
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> centred = load_lanes<A>(g + i, count) - sums.mean_g;
    const Vec<A> d = fma(load_lanes<A>(xhat + i, count), splat(-sums.mean_g_xhat), centred) * factor;
    for (int64_t k = 0; k < count; ++k) {
      const double total = scaled_sum<A>(d[k], shift, out.dsum ? widen<A>(out.dsum[i + k]) : A(0));
      if (out.dx) {
        out.dx[i + k] = narrow<T>(total);
      }
      if (out.dresidual) {
        out.dresidual[i + k] = narrow<X>(total);
      }
    }
  });
}

template <class A, class T, class X>
void write_plain(const A* dy, const A* xhat, const A* weight, int64_t n, const RowSums<A>& sums, A rstd,
                 const Output<T, X>& out) {
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> centred = load_lanes<A>(dy + i, count) * load_lanes<A>(weight + i, count) - sums.mean_g;
    const Vec<A> d = fma(load_lanes<A>(xhat + i, count), splat(-sums.mean_g_xhat), centred) * rstd;
    write_vector<A>(out, i, count, d);
  });
}

// The norm's gradient is 0, or NaN if anything that takes part is not finite (F2).
template <class A, class T, class X>
void write_constant_row(const A* dy, const A* weight, int64_t n, const Output<T, X>& out) {
  A nothing = 0;
  for (int64_t i = 0; i < n; ++i) {
    nothing += dy[i] * A(0) + weight[i] * A(0);
  }
  for_each_vector<A>(n, [&](int64_t i, int64_t count) { write_vector<A>(out, i, count, splat(nothing)); });
}

template <bool kMean, class A, class T, class X>
void write_row(const A* dy, const A* xhat, const A* weight, int64_t n, RowSums<A> sums, const RowStats<A>& stats,
               A* buffer, const Output<T, X>& out) {
  constexpr A kLargest = std::is_same_v<A, float> ? A(0x1p60f) : A(0x1p480);
  const bool in_range = sums.largest_g <= kLargest && sums.largest_g >= 1 / kLargest;
  int exponent = 0;
  if (stats.rstd == 0) {
    write_constant_row(dy, weight, n, out);
  } else if (!in_range && rescue_exponent(dy, weight, n, exponent)) {
    scaled_products(dy, weight, n, exponent, buffer);
    sums = sum_row<kMean, A>(buffer, xhat, nullptr, n, nullptr);
    write_scaled(buffer, xhat, n, sums, stats, exponent, out);
  } else if (stats.scale != 1) {
    for_each_vector<A>(n, [&](int64_t i, int64_t count) {
      store_lanes(buffer + i, load_lanes<A>(dy + i, count) * load_lanes<A>(weight + i, count), count);
    });
    write_scaled(buffer, xhat, n, sums, stats, 0, out);
  } else {
    write_plain(dy, xhat, weight, n, sums, stats.rstd, out);
  }
}

template <class A>
void flush_columns(A* columns, double* sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    sums[i] += static_cast<double>(columns[i]);
    columns[i] = 0;
  }
}

// xhat of a row of any storage type.
template <class A, class X>
void write_xhat(const X* x, int64_t n, const RowStats<A>& stats, A* xhat) {
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    store_lanes(xhat + i, normalised(load_lanes<A>(x + i, count) * stats.scale, stats), count);
  });
}

// T: of dy and dx. X: of what was normalised, dsum and dresidual.
template <class T, class X, bool kMean>
void backward_rows(const NormBackwardArgs& a) {
  using A = Accumulate<T>;
  const int64_t n = a.n, stride = norm_row_bytes(n, a.dtype) / static_cast<int64_t>(sizeof(A));
  A* scratch = static_cast<A*>(a.scratch);
  const A* weight = parameter<A>(a.weight, a.weight_dtype, n, A(1), scratch);
  A* columns = a.sums ? scratch + stride : nullptr;
  A* xhat = scratch + 3 * stride;
  A* buffer = xhat + kNormBlockRows * stride;
  for (int64_t i = 0; columns && i < 2 * n; ++i) {
    columns[i] = 0;
    a.sums[i] = 0;
  }
  for (int64_t row = a.begin; row < a.end; ++row) {
    const int64_t at = row * n;
    const RowStats<A> stats = read_stats<A>(a.stats, row, a.rms);
    const A* dy = widened(static_cast<const T*>(a.dy) + at, n, buffer);
    write_xhat(static_cast<const X*>(a.x) + at, n, stats, xhat);
    const RowSums<A> sums = sum_row<kMean, A>(dy, xhat, weight, n, columns);
    if (a.dx || a.dresidual) {
      const Output<T, X> out = {a.dx ? static_cast<T*>(a.dx) + at : nullptr,
                                a.dresidual ? static_cast<X*>(a.dresidual) + at : nullptr,
                                a.dsum ? static_cast<const X*>(a.dsum) + at : nullptr};
      write_row<kMean, A>(dy, xhat, weight, n, sums, stats, buffer, out);
    }
    if (columns && ((row - a.begin + 1) % kFlushRows == 0 || row + 1 == a.end)) {
      flush_columns(columns, a.sums, 2 * n);
    }
  }
}

}  // namespace

void norm_backward(const NormBackwardArgs& args) {
  visit_with_weight(args.dtype, args.x_dtype, [&](auto t, auto x) {
    using T = typename decltype(t)::type;
    using X = typename decltype(x)::type;
    args.rms ? backward_rows<T, X, false>(args) : backward_rows<T, X, true>(args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
