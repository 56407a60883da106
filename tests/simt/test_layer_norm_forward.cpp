// The forward kernel of cuda/layer_norm.cuh, run on the CPU, against double.
#include "catch.h"
#include "element_types.h"
#include "layer_norm_case.h"

namespace allfinite::simt {
namespace {

const std::vector<int64_t> kLengths = {1, 2, 7, 31, 32, 33, 255, 257, 1000, 1024, 4097};

TEMPLATE_TEST_CASE("layer_norm forward, F3: within the bound for every length, order and alignment", "", ALL_TYPES) {
  using X = typename TestType::X;
  for (const int64_t n : kLengths) {
    for (const int64_t rows : n > 1024 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{1, 3, 33}) {
      auto c = random_case<X, typename TestType::W>(rows, n, static_cast<uint32_t>(n * 64 + rows));
      c.offset = rows == 3 ? 1 : 0;
      const Exact exact = exact_forward(c);
      in_every_order([&] {
        const auto result = run_forward(c);
        CAPTURE(n, rows);
        CHECK(forward_ratio<X>(result.y, exact) < 1);
        CHECK(result.guards_intact);
      });
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm forward: weight, bias, both or none", "", ALL_TYPES) {
  using X = typename TestType::X;
  for (const bool with_weight : {false, true}) {
    for (const bool with_bias : {false, true}) {
      for (const int64_t n : {40, 41}) {
        auto c = random_case<X, typename TestType::W>(3, n, 11);
        c.weight.resize(with_weight ? c.weight.size() : 0);
        c.bias.resize(with_bias ? c.bias.size() : 0);
        CAPTURE(with_weight, with_bias, n);
        CHECK(forward_ratio<X>(run_forward(c).y, exact_forward(c)) < 1);
      }
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm forward, F5: the alignment of the pointers does not change a bit", "", ALL_TYPES) {
  auto c = random_case<typename TestType::X, typename TestType::W>(5, 1024, 3);
  const auto aligned = run_forward(c);
  c.offset = 3;
  const auto misaligned = run_forward(c);
  CHECK(aligned.y == misaligned.y);
  CHECK(aligned.stats == misaligned.stats);
}

TEMPLATE_TEST_CASE("layer_norm forward, F5: a row does not depend on the rows beside it", "", ALL_TYPES) {
  constexpr int64_t kRows = 5, kLength = 300;
  const auto c = random_case<typename TestType::X, typename TestType::W>(kRows, kLength, 4);
  const auto together = run_forward(c);
  for (int64_t row = 0; row < kRows; ++row) {
    auto alone = c;
    alone.rows = 1;
    alone.x.assign(c.x.begin() + row * kLength, c.x.begin() + (row + 1) * kLength);
    const auto y = run_forward(alone).y;
    CHECK(std::equal(y.begin(), y.end(), together.y.begin() + row * kLength));
  }
}

TEMPLATE_TEST_CASE("layer_norm forward, F5: the order of the threads does not change a bit", "", ALL_TYPES) {
  const auto c = random_case<typename TestType::X, typename TestType::W>(3, 1000, 5);
  const auto first = run_forward(c);
  in_every_order([&] { CHECK(run_forward(c).y == first.y); });
}

TEST_CASE("layer_norm forward, F3: fp32 keeps 2e-7 for any mean up to 1e6 standard deviations") {
  for (const double mean : {0.0, 1e2, 1e4, 1e5, 1e6}) {
    for (const int64_t n : {255, 4096}) {
      const auto c = random_case<float, float>(2, n, 6, 1, mean);
      CAPTURE(mean, n);
      CHECK(forward_ratio<float>(run_forward(c).y, exact_forward(c)) < 1);
    }
  }
}

TEST_CASE("layer_norm forward, F3: equal squares along a long row do not add up their rounding") {
  auto c = random_case<float, float>(1, 32768, 7);
  for (int64_t i = 0; i < c.n; ++i) {
    c.x_at(0, i) = to_double(rounded<float>(i % 2 == 0 ? 1.1 : -1.1));
  }
  c.bias.clear();
  CHECK(forward_ratio<float>(run_forward(c).y, exact_forward(c)) < 1);
}

// Powers of two and decimal magnitudes over all of fp32's range, the smallest and the largest included.
TEMPLATE_TEST_CASE("layer_norm forward, F1: rows of any magnitude are right with eps 0", "", BFloat, Float) {
  using X = typename TestType::X;
  for (const double magnitude : {1e-38, 1e-30, 1e-25, 1e-16, 1e10, 1e19, 1e25, 1e30, 1e37}) {
    for (const int64_t n : {64, 257}) {
      auto c = random_case<X, typename TestType::W>(2, n, 8, magnitude, 0);
      c.eps = 0;
      CAPTURE(magnitude, n);
      CHECK(forward_ratio<X>(run_forward(c).y, exact_forward(c)) < 1);
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm forward, F1: rows at the very ends of the range are right with eps 0", "", BFloat,
                   Float) {
  using X = typename TestType::X;
  auto c = random_case<X, typename TestType::W>(5, 64, 9);
  c.eps = 0;
  for (int64_t i = 0; i < c.n; ++i) {
    const double sign = i % 2 == 0 ? 1 : -1;
    c.x_at(0, i) = sign * Format<X>::kMax;
    c.x_at(1, i) = i == 0 ? Format<X>::kMax : 1;
    c.x_at(2, i) = sign * ulp<X>(0) * static_cast<double>(i % 5);  // the smallest subnormals
    c.x_at(3, i) = i % 3 == 0 ? 0x1p-60 : 0x1p-60 + ulp<X>(0x1p-60);
    c.x_at(4, i) = Format<X>::kMax;  // constant: y is the bias
  }
  CHECK(forward_ratio<X>(run_forward(c).y, exact_forward(c)) < 1);
}

TEST_CASE("layer_norm forward, F1: eps is scaled with the row when the row is rescued") {
  for (const double eps : {1e-5, 1e30, 1e38}) {
    auto c = random_case<float, float>(2, 100, 10, 1e20, 0);
    c.eps = eps;
    CAPTURE(eps);
    CHECK(forward_ratio<float>(run_forward(c).y, exact_forward(c)) < 1);
  }
  auto tiny = random_case<float, float>(2, 100, 10, 1e-20, 0);
  tiny.eps = 1e-40;
  CHECK(forward_ratio<float>(run_forward(tiny).y, exact_forward(tiny)) < 1);
}

TEST_CASE("layer_norm forward, F3: subnormal rows keep their digits beside an eps that hides their variance") {
  auto c = random_case<float, float>(3, 100, 11, 1e-42, 0);
  c.eps = 1e-12;
  c.bias.clear();
  CHECK(forward_ratio<float>(run_forward(c).y, exact_forward(c)) < 1);
}

TEMPLATE_TEST_CASE("layer_norm forward, F1: fp16 rows at 65504 are right", "", Half, HalfFloat) {
  auto c = random_case<__half, typename TestType::W>(2, 1024, 12);
  for (int64_t i = 0; i < c.n; ++i) {
    c.x_at(0, i) = i % 2 == 0 ? 65504 : -65504;
    c.x_at(1, i) = i == 5 ? 65504 : 0;
  }
  CHECK(forward_ratio<__half>(run_forward(c).y, exact_forward(c)) < 1);
}

TEST_CASE("layer_norm forward, F1: beyond fp16's range the result is the right infinity, not 65504") {
  auto c = random_case<__half, float>(1, 64, 13);
  c.weight.assign(64, 1e6);
  const auto y = run_forward(c).y;
  const Exact exact = exact_forward(c);
  CHECK(std::count_if(y.begin(), y.end(), [](double v) { return std::isinf(v); }) > 32);
  CHECK(forward_ratio<__half>(y, exact) < 1);
}

TEMPLATE_TEST_CASE("layer_norm forward, F2: a NaN or infinity makes its own row NaN and no other", "", ALL_TYPES) {
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
    for (const int64_t n : {1, 40, 257}) {
      auto c = random_case<typename TestType::X, typename TestType::W>(3, n, 14);
      const auto clean = run_forward(c).y;
      c.x_at(1, n / 2) = bad;
      const auto y = run_forward(c).y;
      for (int64_t i = 0; i < n; ++i) {
        CHECK(y[static_cast<size_t>(i)] == clean[static_cast<size_t>(i)]);
        CHECK(std::isnan(y[static_cast<size_t>(n + i)]));
        CHECK(y[static_cast<size_t>(2 * n + i)] == clean[static_cast<size_t>(2 * n + i)]);
      }
    }
  }
}

TEMPLATE_TEST_CASE("layer_norm forward, F7: a constant row gives the bias exactly, with eps 0 too", "", ALL_TYPES) {
  for (const double eps : {0.0, 1e-300, 1e-12, 1e-5}) {
    for (const int64_t n : {1, 3, 256, 257, 1000}) {
      for (const double value : {0.0, 0.1, 1234.0, -65504.0}) {
        auto c = random_case<typename TestType::X, typename TestType::W>(1, n, 15);
        c.eps = eps;
        c.x.assign(static_cast<size_t>(n), to_double(rounded<typename TestType::X>(value)));
        CAPTURE(eps, n, value);
        CHECK(run_forward(c).y == to_doubles(rounded<typename TestType::X>(c.bias)));
      }
    }
  }
}

TEST_CASE("layer_norm forward: the saved statistics describe the scaled row") {
  auto c = random_case<float, float>(3, 500, 16);
  for (int64_t i = 0; i < c.n; ++i) {
    c.x_at(1, i) = 1e6 + c.x_at(0, i);
    c.x_at(2, i) *= 0x1p100;
  }
  c.x = to_doubles(rounded<float>(c.x));
  const auto stats = run_forward(c).stats;
  for (int64_t row = 0; row < c.rows; ++row) {
    const float* s = stats.data() + row * cuda::kLayerNormStats;
    double sum = 0;
    for (int64_t i = 0; i < c.n; ++i) {
      sum += c.x_at(row, i);
    }
    const double mean = sum / static_cast<double>(c.n), saved_mean = (static_cast<double>(s[0]) + s[1]) / s[3];
    CAPTURE(row);
    // Two fp32 numbers hold the mean to 2^-48 of the row's largest element; rstd is one rounding from double.
    CHECK(std::fabs(saved_mean - mean) <= 0x1p-44 * std::fabs(c.x_at(row, 0)));
    CHECK(std::fabs(s[2] * s[3] / exact_row(c, row).rstd - 1) < 0x1p-22);
    CHECK((s[3] == 1) == (row != 2));
  }
}

TEST_CASE("layer_norm forward: an empty input launches nothing") {
  CHECK(run_forward(random_case<float, float>(0, 16, 17)).guards_intact);
  const auto no_columns = run_forward(random_case<float, float>(3, 0, 17));
  CHECK(no_columns.guards_intact);
  CHECK(std::isnan(no_columns.stats[0]));
}

}  // namespace
}  // namespace allfinite::simt
