// cpu/simd.h as it is compiled for a processor without F16C, FMA or AVX: its conversions are written out by hand there
// and compared here, exhaustively where 16 bits are read, with torch's c10::Half and c10::BFloat16.
//
// A machine with AVX never runs this code otherwise, and a wrong bit would show as a wrong model elsewhere.
#define ALLFINITE_ISA simd_test
#include "cpu/simd.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "catch.h"

namespace {

using namespace allfinite::cpu::simd_test;
using allfinite::cpu::BFloat16;
using allfinite::cpu::Half;

template <class Stored>
struct TorchType;
template <>
struct TorchType<Half> {
  using type = c10::Half;
};
template <>
struct TorchType<BFloat16> {
  using type = c10::BFloat16;
};

template <class Stored>
float torch_widen(uint16_t bits) {
  return static_cast<float>(typename TorchType<Stored>::type(bits, TorchType<Stored>::type::from_bits()));
}
template <class Stored>
uint16_t torch_narrow(float value) {
  return typename TorchType<Stored>::type(value).x;
}

// Any NaN may stand for any other.
template <class Stored>
bool same_narrow(uint16_t a, uint16_t b) {
  return a == b || (std::isnan(torch_widen<Stored>(a)) && std::isnan(torch_widen<Stored>(b)));
}
bool same_float(float a, float b) {
  return float_to_bits(a) == float_to_bits(b) || (std::isnan(a) && std::isnan(b));
}

// All finite 16-bit values and the points between neighbours where rounding turns, with their own neighbours; and a
// pass over all float exponents and signs with mixed mantissas.
template <class Stored>
std::vector<float> critical_floats() {
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float low = torch_widen<Stored>(static_cast<uint16_t>(bits));
    values.push_back(low);
    const float high = torch_widen<Stored>(static_cast<uint16_t>(bits + 1));
    const double middle = 0.5 * static_cast<double>(low) + 0.5 * static_cast<double>(high);
    for (int step = -1; step <= 1; ++step) {
      values.push_back(bits_to_float(float_to_bits(static_cast<float>(middle)) + static_cast<uint32_t>(step)));
    }
  }
  uint32_t bits = 1;
  for (int i = 0; i < 400000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    values.push_back(bits_to_float(bits));
  }
  for (float edge : {65519.99f, 65520.0f, 65504.0f, 5.9604645e-8f, 2.9802322e-8f, 2.9802326e-8f, 3.3895314e38f,
                     3.3961775e38f, 3.4028235e38f}) {
    values.push_back(edge);
    values.push_back(-edge);
  }
  return values;
}

}  // namespace

TEMPLATE_TEST_CASE("widening is exact for all 65536 words", "", Half, BFloat16) {
  int64_t wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const TestType stored{static_cast<uint16_t>(bits)};
    const float expected = torch_widen<TestType>(stored.bits);
    TestType row[kWidth<float>];
    for (auto& element : row) {
      element = stored;
    }
    wrong += !same_float(widen<float>(stored), expected);
    wrong += !same_float(static_cast<float>(widen<double>(stored)), expected);
    wrong += !same_float(load<float>(row)[kWidth<float> - 1], expected);
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("narrowing rounds to nearest even at every boundary", "", Half, BFloat16) {
  int64_t wrong = 0;
  for (const float value : critical_floats<TestType>()) {
    const uint16_t expected = torch_narrow<TestType>(value);
    TestType row[kWidth<float>];
    store(row, splat(value));
    wrong += !same_narrow<TestType>(narrow<TestType>(value).bits, expected);
    wrong += !same_narrow<TestType>(row[0].bits, expected);
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("narrowing a double rounds once", "", Half, BFloat16) {
  // A double just beside a 16-bit tie becomes the tie itself in fp32: rounding twice would go the wrong way.
  int64_t wrong = 0, twice = 0;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const double low = torch_widen<TestType>(static_cast<uint16_t>(bits));
    const double high = torch_widen<TestType>(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) {
      continue;
    }
    const double middle = 0.5 * (low + high);
    for (const double towards : {low, high}) {
      const double beside = std::nextafter(middle, towards);
      const auto result = widen<double>(narrow<TestType>(beside));
      wrong += result != towards;
      twice += torch_widen<TestType>(torch_narrow<TestType>(static_cast<float>(beside))) != towards;
    }
  }
  CHECK(wrong == 0);
  CHECK(twice > 1000);  // the trap is there
}

TEST_CASE("narrowing a double keeps infinities, NaN, signed zero and overflow") {
  const double huge = 1e300, tiny = 1e-300;
  CHECK(narrow<Half>(huge).bits == 0x7c00);
  CHECK(narrow<Half>(-huge).bits == 0xfc00);
  CHECK(narrow<BFloat16>(huge).bits == 0x7f80);
  CHECK(narrow<BFloat16>(-INFINITY * 1.0).bits == 0xff80);
  CHECK(narrow<Half>(65519.999999).bits == 0x7bff);
  CHECK(narrow<Half>(65520.0).bits == 0x7c00);
  CHECK(narrow<BFloat16>(0x1.ffp127).bits == 0x7f80);  // the tie above the largest bfloat16
  CHECK(narrow<BFloat16>(0x1.feffffffffp127).bits == 0x7f7f);
  CHECK(narrow<Half>(tiny).bits == 0x0000);
  CHECK(narrow<Half>(-tiny).bits == 0x8000);
  CHECK(narrow<Half>(-0.0).bits == 0x8000);
  CHECK(narrow<Half>(0x1.0000001p-25).bits == 0x0001);  // just above half of the smallest subnormal
  CHECK(narrow<Half>(0x1p-25).bits == 0x0000);
  CHECK(std::isnan(widen<float>(narrow<Half>(std::nan("")))));
  CHECK(std::isnan(widen<float>(narrow<BFloat16>(std::nan("")))));
  CHECK(std::isinf(narrow<float>(1e39)));
}

TEST_CASE("partial loads and stores touch n elements only") {
  float source[kWidth<float> + 1];
  for (int i = 0; i <= kWidth<float>; ++i) {
    source[i] = static_cast<float>(i + 1);
  }
  for (int n = 0; n <= kWidth<float>; ++n) {
    Half target[kWidth<float> + 1];
    for (auto& element : target) {
      element.bits = 0x7e00;
    }
    const auto v = load_partial<float>(source, n);
    store_partial(target, v, n);
    for (int i = 0; i < kWidth<float>; ++i) {
      CHECK(v[i] == (i < n ? source[i] : 0.0f));
      CHECK(target[i].bits == (i < n ? narrow<Half>(source[i]).bits : 0x7e00));
    }
    CHECK(first_lanes(load<float>(source), n)[0] == (n > 0 ? 1.0f : 0.0f));
  }
}

TEST_CASE("lane sums, maxima and absolute values") {
  float lanes[kWidth<float>];
  float sum = 0;
  for (int i = 0; i < kWidth<float>; ++i) {
    lanes[i] = i % 2 ? -static_cast<float>(i) : static_cast<float>(i);
    sum += lanes[i];
  }
  CHECK(sum_lanes<float>(load<float>(lanes)) == sum);
  CHECK(max_lanes<float>(abs(load<float>(lanes))) == static_cast<float>(kWidth<float> - 1));
  CHECK(float_to_bits(abs(splat(-0.0f))[0]) == 0);
  CHECK(std::isinf(abs(splat(-INFINITY))[0]));
  CHECK(float_to_bits(splat(-0.0f)[0]) == 0x80000000u);
}
