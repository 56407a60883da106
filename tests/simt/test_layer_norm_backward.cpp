// The backward kernels of cuda/layer_norm_backward.cuh, run on the CPU, against double.
#include "catch.h"
#include "element_types.h"
#include "layer_norm_case.h"

namespace allfinite::simt {
namespace {

template <class X, class W>
void check_backward(const BackwardResult& got, const ExactBackward& exact) {
  CHECK(gradient_ratio<X>(got.dx, exact.dx) < 1);
  CHECK(column_ratio<W>(got.dweight, exact.dweight) < 1);
  CHECK(column_ratio<W>(got.dbias, exact.dbias) < 1);
  CHECK(got.guards_intact);
}

TEMPLATE_TEST_CASE("layer_norm backward, F3: within the bound for every length, order and alignment", "", ALL_TYPES) {
  using X = typename TestType::X;
  using W = typename TestType::W;
  for (const int64_t n : {1, 2, 7, 31, 32, 33, 255, 257, 1000, 1024, 4097}) {
    for (const int64_t rows : n > 255 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 3, 33, 100}) {
      auto c = random_case<X, W>(rows, n, static_cast<uint32_t>(n * 64 + rows));
      c.offset = rows == 3 ? 1 : 0;
      const ExactBackward exact = exact_backward(c);
      in_every_order([&] {
        CAPTURE(n, rows);
        check_backward<X, W>(run_backward(c), exact);
      });
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm backward: without a weight, and each output alone", "", ALL_TYPES) {
  using X = typename TestType::X;
  auto c = random_case<X, typename TestType::W>(40, 72, 21);
  const auto all = run_backward(c);
  const auto only_dx = run_backward(c, {true, false, false}), only_dweight = run_backward(c, {false, true, false}),
             only_dbias = run_backward(c, {false, false, true});
  CHECK(only_dx.dx == all.dx);
  CHECK(std::isnan(only_dx.dweight[0]));
  CHECK(only_dweight.dweight == all.dweight);
  CHECK(std::isnan(only_dweight.dx[0]));
  CHECK(std::isnan(only_dweight.dbias[0]));
  CHECK(only_dbias.dbias == all.dbias);
  CHECK(std::isnan(only_dbias.dweight[0]));
  c.weight.clear();
  CHECK(gradient_ratio<X>(run_backward(c).dx, exact_backward(c).dx) < 1);
}

TEMPLATE_TEST_CASE("layer_norm backward, F5: alignment and thread order do not change a bit", "", ALL_TYPES) {
  auto c = random_case<typename TestType::X, typename TestType::W>(70, 128, 22);
  const auto first = run_backward(c);
  c.offset = 1;
  in_every_order([&] {
    const auto again = run_backward(c);
    CHECK(again.dx == first.dx);
    CHECK(again.dweight == first.dweight);
    CHECK(again.dbias == first.dbias);
  });
}

TEST_CASE("layer_norm backward, F3: fp32 stays right for any mean up to 1e6 standard deviations") {
  for (const double mean : {0.0, 1e2, 1e4, 1e6}) {
    const auto c = random_case<float, float>(40, 1000, 23, 1, mean);
    CAPTURE(mean);
    check_backward<float, float>(run_backward(c), exact_backward(c));
  }
}

TEMPLATE_TEST_CASE("layer_norm backward, F3: the column sums of many rows lose nothing", "", ALL_TYPES) {
  using W = typename TestType::W;
  auto c = random_case<typename TestType::X, W>(1024, 8, 24);
  std::fill(c.dy.begin(), c.dy.end(), 1.0);
  const auto got = run_backward(c, {false, true, true});
  const ExactBackward exact = exact_backward(c);
  CHECK(got.dbias == std::vector<double>(8, 1024.0));
  CHECK(column_ratio<W>(got.dweight, exact.dweight) < 1);
  // Equal terms that are no dyadic fractions: plain fp32 sums would drift to one side.
  std::fill(c.dy.begin(), c.dy.end(), to_double(rounded<typename TestType::X>(1.1)));
  CHECK(column_ratio<W>(run_backward(c, {false, true, true}).dbias, exact_backward(c).dbias) < 1);
}

// Every gradient of dy * 2^k against that of dy, times 2^k: the same bits, unless one of the two is not a
// normal number.
template <class T>
void check_scaled(const std::vector<double>& base, const std::vector<double>& scaled, double factor) {
  int compared = 0;
  for (size_t i = 0; i < base.size(); ++i) {
    const double smallest = std::ldexp(1.0, Format<T>::kMinExponent), want = base[i] * factor;
    const auto normal = [&](double v) { return std::fabs(v) >= smallest && std::fabs(v) <= Format<T>::kMax; };
    if (normal(base[i]) && normal(want)) {
      ++compared;
      if (scaled[i] != want) {
        FAIL_CHECK("element " << i << ": " << scaled[i] << " instead of " << want << ", factor " << factor);
      }
    }
  }
  CHECK(compared > 0);
}

template <class X, class W>
void check_linear(LayerNormCase<X, W> c, std::vector<int> exponents) {
  const auto base = run_backward(c);
  const auto dy = c.dy;
  for (const int k : exponents) {
    const double factor = std::ldexp(1.0, k);
    for (size_t i = 0; i < dy.size(); ++i) {
      c.dy[i] = dy[i] * factor;
    }
    const auto scaled = run_backward(c);
    check_scaled<X>(base.dx, scaled.dx, factor);
    check_scaled<W>(base.dweight, scaled.dweight, factor);
    check_scaled<W>(base.dbias, scaled.dbias, factor);
  }
}

TEMPLATE_TEST_CASE("layer_norm backward, F4: linear in dy bit for bit, bf16 and fp32 over 2^-56 .. 2^56", "", BFloat,
                   BFloatFloat, Float) {
  auto c = random_case<typename TestType::X, typename TestType::W>(40, 96, 25);
  for (double& dy : c.dy) {  // |dy| in [2^-4, 4), so that no scaled value leaves the rule's range
    dy = std::copysign(std::max(std::fabs(dy), 0.0625), dy);
  }
  check_linear(c, {-56, -30, -1, 1, 30, 56});
  // With weights this large or small, g leaves fp32's comfortable range for some of the factors and not for
  // others.
  for (const double extreme : {0x1p70, 0x1p-70}) {
    auto scaled_weight = c;
    for (double& w : scaled_weight.weight) {
      w *= extreme;
    }
    check_linear(scaled_weight, {-56, 56});
  }
}

TEMPLATE_TEST_CASE("layer_norm backward, F4: linear in dy bit for bit, fp16", "", Half, HalfFloat) {
  auto c = random_case<__half, typename TestType::W>(40, 96, 26);
  for (double& dy : c.dy) {
    dy = to_double(rounded<__half>(std::copysign(std::max(std::fabs(dy), 0.0625), dy)));
  }
  check_linear(c, {-8, -3, 1, 13});
}

TEMPLATE_TEST_CASE("layer_norm backward, F1: factors beyond fp32 whose gradient is in range", "", BFloat, BFloatFloat,
                   Float) {
  using X = typename TestType::X;
  using W = typename TestType::W;
  struct Magnitudes {
    double dy, weight, x;
  };
  for (const auto m : {Magnitudes{1e30, 1e30, 1e37},
                       {1e-30, 1e-25, 1e-30},
                       {1e38, 1, 1e10},
                       {1e-38, 1e30, 1},
                       {1e30, 1e30, 1e30},
                       {1, 1, 1e-37}}) {
    for (const int64_t n : {64, 65}) {
      auto c = random_case<X, W>(3, n, 27, m.x, 0);
      c.eps = 0;
      for (double& dy : c.dy) {
        dy = to_double(rounded<X>(dy / 8 * m.dy));
      }
      for (double& w : c.weight) {
        w = to_double(rounded<W>(w * m.weight));
      }
      CAPTURE(m.dy, m.weight, m.x, n);
      const auto got = run_backward(c);
      const auto exact = exact_backward(c);
      CHECK(worst_ratio<X>(got.dx, exact.dx, 1, 0x1p-20) < 1);
      CHECK(column_ratio<W>(got.dweight, exact.dweight) < 1);
      CHECK(column_ratio<W>(got.dbias, exact.dbias) < 1);
    }
  }
}

TEST_CASE("layer_norm backward, F1: a large entry under a zero weight does not flush the others") {
  auto c = random_case<float, float>(1, 64, 28);
  c.weight.assign(64, 0x1p-60);
  c.weight[0] = 0;
  c.dy.assign(64, 0x1p-60);
  c.dy[0] = 0x1p100;
  for (int64_t i = 1; i < 64; i += 2) {
    c.dy_at(0, i) = -0x1.8p-60;
  }
  CHECK(worst_ratio<float>(run_backward(c, {true, false, false}).dx, exact_backward(c).dx, 1, 0x1p-20) < 1);
}

TEMPLATE_TEST_CASE("layer_norm backward, F1: column sums that overflow on the way to a finite result", "", BFloat,
                   Float) {
  using X = typename TestType::X;
  auto c = random_case<X, typename TestType::W>(100, 40, 29);
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.n; ++i) {
      c.x_at(row, i) = i % 2 == 0 ? 3 : -1;
      c.dy_at(row, i) = row % 4 < 2 ? Format<X>::kMax : -Format<X>::kMax;
    }
  }
  c.dy_at(0, 0) = Format<X>::kMax / 2;
  const auto got = run_backward(c, {false, true, true});
  const auto exact = exact_backward(c);
  CHECK(column_ratio<typename TestType::W>(got.dweight, exact.dweight) < 1);
  CHECK(column_ratio<typename TestType::W>(got.dbias, exact.dbias) < 1);
  CHECK(got.dbias[0] == -Format<X>::kMax / 2);
}

TEST_CASE("layer_norm backward, F3: column sums of products below fp32's smallest number") {
  auto c = random_case<float, float>(1024, 4, 30);
  std::fill(c.dy.begin(), c.dy.end(), 0x1p-149);
  const auto exact = exact_backward(c);
  CHECK(column_ratio<float>(run_backward(c, {false, true, true}).dweight, exact.dweight) < 1);
}

TEMPLATE_TEST_CASE("layer_norm backward, F2: a NaN in dy reaches its row of dx and its column, nothing else", "",
                   ALL_TYPES) {
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    auto c = random_case<typename TestType::X, typename TestType::W>(40, 41, 31);
    const auto clean = run_backward(c);
    c.dy_at(35, 7) = bad;
    const auto got = run_backward(c);
    for (int64_t row = 0; row < c.rows; ++row) {
      for (int64_t i = 0; i < c.n; ++i) {
        const auto k = static_cast<size_t>(row * c.n + i);
        CHECK((row == 35 ? std::isnan(got.dx[k]) : got.dx[k] == clean.dx[k]));
      }
    }
    for (size_t i = 0; i < 41; ++i) {
      CHECK((i == 7 ? !std::isfinite(got.dweight[i]) : got.dweight[i] == clean.dweight[i]));
      CHECK((i == 7 ? !std::isfinite(got.dbias[i]) : got.dbias[i] == clean.dbias[i]));
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm backward, F2: a NaN in x shows in its row of dx and in dweight, not in dbias", "",
                   ALL_TYPES) {
  auto c = random_case<typename TestType::X, typename TestType::W>(3, 24, 32);
  const auto clean = run_backward(c);
  c.x_at(1, 2) = NAN;
  const auto got = run_backward(c);
  CHECK(std::isnan(got.dx[24]));
  CHECK(std::isnan(got.dx[47]));
  CHECK(got.dx[0] == clean.dx[0]);
  CHECK(got.dx[71] == clean.dx[71]);
  CHECK(std::isnan(got.dweight[23]));
  CHECK(got.dbias == clean.dbias);
}

TEMPLATE_TEST_CASE("layer_norm backward, F7: a constant row with eps 0 gives dx 0, and NaN in dy still shows", "",
                   ALL_TYPES) {
  for (const double value : {0.0, 0.1, 1e4}) {
    for (const int64_t n : {1, 65}) {
      auto c = random_case<typename TestType::X, typename TestType::W>(2, n, 33);
      c.eps = 0;
      c.x.assign(c.x.size(), to_double(rounded<typename TestType::X>(value)));
      c.dy_at(1, 0) = NAN;
      const auto got = run_backward(c, {true, false, false});
      for (int64_t i = 0; i < n; ++i) {
        CHECK(got.dx[static_cast<size_t>(i)] == 0.0);
        CHECK(std::isnan(got.dx[static_cast<size_t>(n + i)]));
      }
    }
  }
}

// ThreadSanitizer makes a thread of each of the kernels' threads, a millisecond each: every path once, on few blocks.
TEST_CASE("layer_norm, F5: no kernel has a race, on the ordinary and on the rescue paths", "[races]") {
  auto c = random_case<float, float>(3, 40, 35);
  for (int64_t i = 0; i < c.n; ++i) {
    c.x_at(2, i) *= 0x1p100;
    c.dy_at(0, i) = i % 2 == 0 ? Format<float>::kMax : -Format<float>::kMax;
    c.dy_at(1, i) = c.dy_at(0, i);
  }
  const auto exact = exact_backward(c);
  const auto got = run_backward(c);
  CHECK(worst_ratio<float>(got.dx, exact.dx, 1, 0x1p-20) < 1);
  CHECK(column_ratio<float>(got.dweight, exact.dweight) < 1);
  const auto wide = random_case<float, float>(1, 300, 36);  // more than one warp to a row
  CHECK(gradient_ratio<float>(run_backward(wide, {true, false, false}).dx, exact_backward(wide).dx) < 1);
}

TEST_CASE("layer_norm backward: no rows give zero column sums, no columns launch nothing") {
  const auto no_rows = run_backward(random_case<float, float>(0, 40, 34));
  CHECK(no_rows.dweight == std::vector<double>(40, 0.0));
  CHECK(no_rows.dbias == std::vector<double>(40, 0.0));
  CHECK(run_backward(random_case<float, float>(3, 0, 34)).guards_intact);
}

}  // namespace
}  // namespace allfinite::simt
