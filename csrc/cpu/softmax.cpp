// Softmax forward: y = exp(scale * x + bias - largest) / sum, row by row (softmax_row.h: the scores).
//
// Bytes: x read and y written once in memory, 2 b per element, and the mask; where backward will need the weights of a
// 16-bit row, 4 more. The exponentials of a row are kept in L1 (fp32, fp64: in y itself). Floor: copy bandwidth out of
// cache, in cache about 20 vector instructions for 16 elements (AVX-512), 13 of them exp.
// Left after measurement (one thread of a 2-core Xeon with AVX-512, other work beside it): 256 x 768 in cache takes
// 0.43 ns an element in fp16, 0.49 in bf16, 0.57 in fp32, most of it exp.
// Tails of less than a vector (197 columns) double that of a short row; a float bias adds 0.4 ns for its scores in
// double.
//
// Accumulation: fp32 (fp64) weights, added in chains of 8 vectors, the chains in double (row_sum.h). A row in which
// nothing takes part is 0. A NaN or +inf that takes part makes the row NaN, but for what is masked: that is 0.
#include "cpu/softmax.h"

#include "cpu/row_sum.h"
#include "cpu/softmax_row.h"

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

// y = weights * inverse; kKeep: also in `weights`.
template <bool kKeep, class T, class A>
ALLFINITE_INLINE void divide(A* weights, A inverse, T* y, int64_t n) {
  constexpr int w = kWidth<A>;
  const auto one = [&](int64_t i, int64_t count) {
    const Vec<A> v = load_some<A>(weights + i, count) * inverse;
    if constexpr (kKeep) {
      store_some(weights + i, v, count);
    }
    return v;
  };
  int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    store_two(y + i, one(i, w), one(i + w, w));
  }
  for (; i < n; i += w) {
    const int64_t count = n - i < w ? n - i : w;
    store_some(y + i, one(i, count), count);
  }
}

template <class T, class Row>
void fill_with_nan(const Row& row, T* y, float* weights, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = row.masked(i) ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    y[i] = narrow<T>(value);
    if (weights) {
      weights[i] = value;
    }
  }
}

template <class T, Product kProduct>
void forward_rows(const SoftmaxForwardArgs& a) {
  using A = Accumulate<T>;
  const Scale<A> scale(a.scale);
  MaskRows<A> mask(a.mask, static_cast<A*>(scratch_part(a.scratch, a.n, 1)), a.n);
  for (int64_t r = a.begin; r < a.end; ++r) {
    T* y = static_cast<T*>(a.y) + r * a.n;
    const RowScores<T, kProduct> row(static_cast<const T*>(a.x) + r * a.n, mask.row(r), a.n, scale);
    const auto top = row.top();
    float* kept = a.weights ? a.weights + r * a.n : nullptr;
    if (row.empty(top)) {
      __builtin_memset(y, 0, static_cast<size_t>(a.n) * sizeof(T));
      if (kept) {
        __builtin_memset(kept, 0, static_cast<size_t>(a.n) * sizeof(float));
      }
      continue;
    }
    A* weights = nullptr;
    if constexpr (std::is_same_v<T, A>) {
      weights = y;
    } else {
      weights = kept ? kept : static_cast<A*>(a.scratch);
    }
    const double sum = weigh(row, top, a.n, weights);
    if (!__builtin_isfinite(sum)) {
      fill_with_nan(row, y, kept, a.n);
    } else if (kept) {
      divide<true>(weights, static_cast<A>(1 / sum), y, a.n);
    } else {
      divide<false>(weights, static_cast<A>(1 / sum), y, a.n);
    }
  }
}

}  // namespace

void softmax_forward(const SoftmaxForwardArgs& args) {
  visit_rows(args.dtype, args.scale, args.mask, [&](auto tag, auto product) {
    forward_rows<typename decltype(tag)::type, decltype(product)::value>(args);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
