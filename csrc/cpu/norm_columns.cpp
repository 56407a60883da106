// Column sums of the norm backward: the chunks of rows that norm_backward.cpp left are added up in order and rounded to
// the parameter's dtype.
//
// Bytes: 16 n a chunk read, the gradients written. Sums in double. A column that is not finite, because a sum left the
// range, is summed again in double row by row.
#include "cpu/norm.h"
#include "cpu/norm_row.h"
#include "cpu/simd.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// One column's sum in double, row by row: for columns whose sums left the range. fp64 makes room for what overflows on
// the way only.
template <class T, class X>
double exact_column(const NormBackwardArgs& a, int64_t column, bool of_weight) {
  constexpr double kRoom = std::is_same_v<T, double> ? 0x1p-64 : 1;
  double total = 0;
  for (int64_t row = a.begin; row < a.end; ++row) {
    const auto s = read_stats<Accumulate<T>>(a.stats, row, a.rms);
    const double dy = widen<double>(static_cast<const T*>(a.dy)[row * a.n + column]) * kRoom;
    const double x = widen<double>(static_cast<const X*>(a.x)[row * a.n + column]);
    const double centred =
        (x * static_cast<double>(s.scale) - static_cast<double>(s.mean_hi)) - static_cast<double>(s.mean_lo);
    total += of_weight ? dy * (centred * static_cast<double>(s.rstd)) : dy;
  }
  return total / kRoom;
}

template <class T, class X, class G>
void write_columns(const NormColumnsArgs& a, int64_t which, G* out) {
  const int64_t n = a.rows.n;
  const double* sums = a.sums + which * n;
  for_each_vector<double>(n, [&](int64_t i, int64_t count) {
    Vec<double> total = {};
    for (int64_t c = 0; c < a.chunks; ++c) {
      total += load_some<double>(sums + c * 2 * n + i, count);
    }
    for (int64_t k = 0; k < count; ++k) {
      const double sum = total[k];
      out[i + k] = narrow<G>(__builtin_isfinite(sum) ? sum : exact_column<T, X>(a.rows, i + k, which == 0));
    }
  });
}

}  // namespace

void norm_columns(const NormColumnsArgs& args) {
  visit_with_weight(args.rows.dtype, args.rows.x_dtype, [&](auto t, auto x) {
    using T = typename decltype(t)::type;
    using X = typename decltype(x)::type;
    const auto write = [&](int64_t which, void* out, DType dtype) {
      if (out) {
        visit_dtype(dtype, [&](auto g) {
          using G = typename decltype(g)::type;
          write_columns<T, X>(args, which, static_cast<G*>(out));
        });
      }
    };
    write(0, args.dweight, args.dweight_dtype);
    write(1, args.dbias, args.dbias_dtype);
  });
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
