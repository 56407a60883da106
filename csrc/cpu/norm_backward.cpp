// Norm backward. With g = dy * weight and xhat from the saved statistics:
//   dx = rstd * scale * (g - mean(g) - xhat * mean(g * xhat)), plus dsum;  rms_norm: without mean(g);
//   dweight = sum over rows of dy * xhat,  dbias = of dy (norm_columns.cpp adds the chunks up).
//
// Bytes: dy and x read, dx written once in memory (further passes over a row hit the cache): 3 b per element, dsum one
// more, and 16 n bytes a chunk of rows for the column sums. Floor: copy bandwidth. Measured on a 2-core Xeon with
// AVX-512, one thread, beyond the caches: 12 to 24 GB/s in fp32, where a copy past the caches has 22 to 33; 8 to 15 in
// 16 bits. Between the two: some 14 instructions a vector, as many as 10 more for 16 bits, and for long rows the column
// accumulators, which lie in the second-level cache; xhat is made twice, which costs less than to keep it there.
//
// Rows go in blocks: one pass sums rows and columns, one writes; both widen dy and x and make xhat in registers. Row
// sums: short fp32 chains, chains in double (row_sum.h). Column sums: fp32 over at most kFlushRows rows, then double,
// so that the error does not grow with the number of rows (F3); one buffer a chunk, chunks added in order (F5).
//
// Range: where g leaves [2^-60, 2^60] the row is done with g times a power of two, made from the exponents of dy
// and weight apart (norm_rescue.h); where rstd is beyond 2^60, its exponent is added to theirs. dx of a row with rstd =
// 0 is dsum or 0.
#include "cpu/norm.h"
#include "cpu/norm_rescue.h"
#include "cpu/norm_row.h"
#include "cpu/row_sum.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

constexpr int kRows = kNormBlockRows;
constexpr int kLanes = 2;  // independent accumulators of a row
constexpr int64_t kFlushRows = 8;
static_assert(kFlushRows % kRows == 0);

template <class A>
struct RowSums {
  A mean_g, mean_g_xhat, largest_g;
};

// Rows as they are stored, and what makes xhat of them. T: of dy. X: of what was normalised.
template <class T, class X>
struct Rows {
  using A = Accumulate<T>;
  const T* dy[kRows];
  const X* x[kRows];
  RowStats<A> stats[kRows];
};

// xhat in the lanes behind the row would be -mean * rstd, which may be infinite.
template <bool kCentred, class V>
ALLFINITE_INLINE V of_row(V xhat, int64_t count) {
  return kCentred && count < static_cast<int64_t>(sizeof(V) / sizeof(xhat[0])) ? first_lanes(xhat, count) : xhat;
}

// Means of g and g * xhat and the largest |g| of kCount rows from `first` on, where g is dy * weight, or dy; with
// kColumns also adds dy * xhat and dy to the column accumulators, [2, n]. kScaled: a row may be times a power of two.
template <int kCount, bool kCentred, bool kWeighted, bool kColumns, bool kScaled, class T, class X,
          class A = Accumulate<T>>
void sum_rows(const Rows<T, X>& rows, int first, const A* weights, int64_t n, A* columns, RowSums<A>* sums) {
  constexpr int w = kWidth<A>;
  constexpr int64_t block = kChain * kLanes * w;
  Normalise<kCentred, A> normalise[kCount];
  for (int r = 0; r < kCount; ++r) {
    normalise[r] = Normalise<kCentred, A>(rows.stats[first + r]);
  }
  WideSum<A> total_g[kCount], total_gx[kCount];
  Vec<A> largest[kCount] = {};
  for (int64_t start = 0; start < n; start += block) {
    const int64_t stop = start + block < n ? start + block : n;
    Vec<A> sum_g[kCount][kLanes] = {}, sum_gx[kCount][kLanes] = {};
    const auto step = [&](int u, int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec<A> weight = kWeighted ? load_some<A>(weights + i, count) : Vec<A>{};
      Vec<A> of_weight = {}, of_bias = {};
      for (int r = 0; r < kCount; ++r) {
        const Vec<A> d = load_some<A>(rows.dy[first + r] + i, count);
        const Vec<A> x = load_some<A>(rows.x[first + r] + i, count);
        const Vec<A> scaled = kScaled ? x * rows.stats[first + r].scale : x;
        const Vec<A> xhat = of_row<kCentred>(normalise[r](scaled), count);
        const Vec<A> g = kWeighted ? d * weight : d;
        sum_gx[r][u] = fma(g, xhat, sum_gx[r][u]);
        largest[r] = max(largest[r], abs(g));
        if constexpr (kCentred) {
          sum_g[r][u] += g;
        }
        if constexpr (kColumns) {
          of_weight = fma(d, xhat, of_weight);
          of_bias += d;
        }
      }
      if constexpr (kColumns) {
        store_some(columns + i, load_some<A>(columns + i, count) + of_weight, count);
        if constexpr (kCentred) {
          A* bias = columns + n + i;
          store_some(bias, load_some<A>(bias, count) + of_bias, count);
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
    for (int r = 0; r < kCount; ++r) {
      total_g[r].add(sum_g[r][0] + sum_g[r][1]);
      total_gx[r].add(sum_gx[r][0] + sum_gx[r][1]);
    }
  }
  const double count = static_cast<double>(n);
  for (int r = 0; r < kCount; ++r) {
    const double of_g = kCentred ? total_g[r].total() : 0, of_gx = total_gx[r].total();
    sums[r] = {static_cast<A>(of_g / count), static_cast<A>(of_gx / count), max_lanes<A>(largest[r])};
  }
}

// One row of what is written, and of the gradient that is added to it. T: of dx. X: of dsum and dresidual.
template <class T, class X>
struct Output {
  T* dx;
  X* dresidual;
  const X* dsum;
};

template <Place kPlace, class A, class T, class X>
ALLFINITE_INLINE void write_vector(const Output<T, X>& out, int64_t i, int64_t count, Vec<A> d) {
  if (out.dsum) {
    d += load_some<A>(out.dsum + i, count);
  }
  if (out.dx) {
    store_output<kPlace>(out.dx + i, d, count);
  }
  if (out.dresidual) {
    store_output<kPlace>(out.dresidual + i, d, count);
  }
}

// g: times 2^-exponent.
template <class A, class T, class X>
void write_scaled(const A* g, const A* xhat, int64_t n, const RowSums<A>& sums, const RowStats<A>& s, int exponent,
                  const Output<T, X>& out) {
  int of_rstd = 0, of_scale = 0;
  const A factor = static_cast<A>(__builtin_frexp(static_cast<double>(s.rstd), &of_rstd));
  __builtin_frexp(static_cast<double>(s.scale), &of_scale);  // a power of two: 0.5 * 2^of_scale
  const int shift = exponent + of_rstd + s.exponent + of_scale - 1;
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    const Vec<A> centred = load_some<A>(g + i, count) - sums.mean_g;
    const Vec<A> d = fma(load_some<A>(xhat + i, count), splat(-sums.mean_g_xhat), centred) * factor;
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

// Meanwhile the inputs of the next block are fetched.
template <Place kPlace, bool kCentred, class A, class T, class X>
void write_plain(const Rows<T, X>& rows, int row, const A* weight, int64_t n, const RowSums<A>& sums,
                 const Output<T, X>& out) {
  const T* dy = rows.dy[row];
  const X* x = rows.x[row];
  const Normalise<kCentred, A> normalise(rows.stats[row]);
  const Vec<A> mean = splat(sums.mean_g), slope = splat(-sums.mean_g_xhat), rstd = splat(rows.stats[row].rstd);
  const auto gradient = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Vec<A> g = load_some<A>(dy + i, count) * load_some<A>(weight + i, count);
    const Vec<A> xhat = normalise(load_some<A>(x + i, count));
    prefetch<kPlace>(dy, i + kRows * n);
    prefetch<kPlace>(x, i + kRows * n);
    return fma(xhat, slope, kCentred ? g - mean : g) * rstd;
  };
  if (out.dx && !out.dresidual && !out.dsum) {  // apart, without conditions in the loop
    const Output<T, X> only = {out.dx, nullptr, nullptr};
    for_each_vector<A>(n,
                       [&](int64_t i, int64_t count) { write_vector<kPlace, A>(only, i, count, gradient(i, count)); });
  } else {
    for_each_vector<A>(n, [&](int64_t i, int64_t count) {
      if (out.dsum) {
        prefetch<kPlace>(out.dsum, i + kRows * n);
      }
      write_vector<kPlace, A>(out, i, count, gradient(i, count));
    });
  }
}

// The norm's gradient is 0, or NaN if anything that takes part is not finite (F2).
template <class A, class T, class X>
void write_constant_row(const T* dy, const A* weight, int64_t n, const Output<T, X>& out) {
  A nothing = 0;
  for (int64_t i = 0; i < n; ++i) {
    nothing += widen<A>(dy[i]) * A(0) + weight[i] * A(0);
  }
  for_each_vector<A>(n,
                     [&](int64_t i, int64_t count) { write_vector<Place::kCached, A>(out, i, count, splat(nothing)); });
}

// False where the row is one that write_plain serves. g, xhat: buffers of a row.
template <bool kCentred, class A, class T, class X>
bool write_special(const Rows<T, X>& rows, int row, const A* weight, int64_t n, const RowSums<A>& plain, A* g, A* xhat,
                   const Output<T, X>& out) {
  constexpr A kLargest = std::is_same_v<A, float> ? A(0x1p60f) : A(0x1p480);
  const bool in_range = plain.largest_g <= kLargest && plain.largest_g >= 1 / kLargest;
  const RowStats<A>& stats = rows.stats[row];
  if (stats.rstd == 0) {
    write_constant_row(rows.dy[row], weight, n, out);
    return true;
  }
  const bool apart = stats.scale != 1 || stats.exponent != 0 || stats.rstd > kLargest;
  if (in_range && !apart) {
    return false;
  }
  for_each_vector<A>(
      n, [&](int64_t i, int64_t count) { store_some(g + i, load_some<A>(rows.dy[row] + i, count), count); });
  int exponent = 0;
  const bool scaled = !in_range && rescue_exponent<A>(g, weight, n, exponent);
  if (!scaled && !apart) {
    return false;
  }
  const Normalise<kCentred, A> normalise(stats);
  for_each_vector<A>(n, [&](int64_t i, int64_t count) {
    store_some(xhat + i, normalise(load_some<A>(rows.x[row] + i, count) * stats.scale), count);
  });
  RowSums<A> sums = plain;
  if (scaled) {
    scaled_products<A>(g, weight, n, exponent, g);
    const Rows<A, A> products = {{g}, {xhat}, {{0, 0, 1, 1, 0}}};
    sum_rows<1, kCentred, false, false, false>(products, 0, static_cast<const A*>(nullptr), n, static_cast<A*>(nullptr),
                                               &sums);
  } else {
    for_each_vector<A>(n, [&](int64_t i, int64_t count) {
      store_some(g + i, load_some<A>(g + i, count) * load_some<A>(weight + i, count), count);
    });
  }
  write_scaled(g, xhat, n, sums, stats, exponent, out);
  return true;
}

// Adds the column accumulators to the sums and clears them.
template <class A>
void flush_columns(A* columns, double* sums, int64_t count) {
  constexpr int w = kWidth<double>;
  int64_t i = 0;
  for (; i + w <= count; i += w) {
    store(sums + i, load<double>(sums + i) + load<double>(columns + i));
  }
  for (; i < count; ++i) {
    sums[i] += static_cast<double>(columns[i]);
  }
  __builtin_memset(columns, 0, static_cast<size_t>(count) * sizeof(A));
}

template <class T>
T* row_of(const void* p, int64_t offset) {
  return p ? static_cast<T*>(const_cast<void*>(p)) + offset : nullptr;
}

// T: of dy and dx. X: of what was normalised, dsum and dresidual.
template <bool kCentred, bool kColumns, class T, class X>
void backward_rows(const NormBackwardArgs& a) {
  using A = Accumulate<T>;
  const int64_t n = a.n, stride = norm_row_bytes(n, a.dtype) / static_cast<int64_t>(sizeof(A));
  A *scratch = static_cast<A*>(a.scratch), *columns = scratch + stride, *buffer = scratch + 3 * stride;
  const A* weight = parameter<A>(a.weight, a.weight_dtype, n, A(1), scratch);
  if constexpr (kColumns) {
    __builtin_memset(columns, 0, static_cast<size_t>(2 * n) * sizeof(A));
    __builtin_memset(a.sums, 0, static_cast<size_t>(2 * n) * sizeof(double));
  }
  const Place place = place_of(a.rows, n * static_cast<int64_t>(sizeof(T)), a.dsum ? 4 : 3, a.dx, a.dresidual);
  int64_t unflushed = 0;
  for (int64_t first = a.begin; first < a.end; first += kRows) {
    const int count = a.end - first < kRows ? static_cast<int>(a.end - first) : kRows;
    Rows<T, X> rows;
    RowSums<A> sums[kRows];
    bool scaled = false;
    for (int r = 0; r < count; ++r) {
      rows.dy[r] = static_cast<const T*>(a.dy) + (first + r) * n;
      rows.x[r] = static_cast<const X*>(a.x) + (first + r) * n;
      rows.stats[r] = read_stats<A>(a.stats, first + r, a.rms);
      scaled = scaled || rows.stats[r].scale != 1;
    }
    if (count == kRows && !scaled) {
      sum_rows<kRows, kCentred, true, kColumns, false>(rows, 0, weight, n, columns, sums);
    } else {
      for (int r = 0; r < count; ++r) {
        sum_rows<1, kCentred, true, kColumns, true>(rows, r, weight, n, columns, sums + r);
      }
    }
    for (int r = 0; (a.dx || a.dresidual) && r < count; ++r) {
      const int64_t at = (first + r) * n;
      const Output<T, X> out = {row_of<T>(a.dx, at), row_of<X>(a.dresidual, at), row_of<const X>(a.dsum, at)};
      if (!write_special<kCentred>(rows, r, weight, n, sums[r], buffer, buffer + stride, out)) {
        visit_place(place,
                    [&](auto p) { write_plain<decltype(p)::value, kCentred>(rows, r, weight, n, sums[r], out); });
      }
    }
    unflushed += count;
    if (kColumns && (unflushed >= kFlushRows || first + count == a.end)) {
      flush_columns(columns, a.sums, 2 * n);
      unflushed = 0;
    }
  }
  if (place == Place::kStreamed) {
    finish_streaming();
  }
}

}  // namespace

void norm_backward(const NormBackwardArgs& args) {
  visit_with_weight(args.dtype, args.x_dtype, [&](auto t, auto x) {
    using T = typename decltype(t)::type;
    using X = typename decltype(x)::type;
    if (args.rms) {
      args.sums ? backward_rows<false, true, T, X>(args) : backward_rows<false, false, T, X>(args);
    } else {
      args.sums ? backward_rows<true, true, T, X>(args) : backward_rows<true, false, T, X>(args);
    }
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
