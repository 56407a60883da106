// Storage types in tests: exact conversions to double, one rounding from double, and how far a result may be
// off.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/common/dtype.h"

namespace allfinite::simt {

template <class T>
struct Format;
template <>
struct Format<__half> {
  static constexpr cuda::DType kDType = cuda::DType::kFloat16;
  static constexpr int kMinExponent = -14, kMantissaBits = 10;
  static constexpr double kMax = 65504.0;
};
template <>
struct Format<__nv_bfloat16> {
  static constexpr cuda::DType kDType = cuda::DType::kBFloat16;
  static constexpr int kMinExponent = -126, kMantissaBits = 7;
  static constexpr double kMax = 0x1.fep127;
};
template <>
struct Format<float> {
  static constexpr cuda::DType kDType = cuda::DType::kFloat32;
  static constexpr int kMinExponent = -126, kMantissaBits = 23;
  static constexpr double kMax = 0x1.fffffep127;
};

inline double to_double(float value) {
  return value;
}
inline double to_double(__half value) {
  return __half2float(value);
}
inline double to_double(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// Distance between two neighbours of T at `value`.
template <class T>
double ulp(double value) {
  const int exponent = value == 0 ? Format<T>::kMinExponent : std::max(std::ilogb(value), Format<T>::kMinExponent);
  return std::ldexp(1.0, exponent - Format<T>::kMantissaBits);
}

// Rounds to nearest, ties to even; beyond the range of T to infinity.
template <class T>
T rounded(double value) {
  if (!std::isfinite(value) || value == 0) {
    return T(static_cast<float>(value));
  }
  const double spacing = ulp<T>(value), result = std::nearbyint(value / spacing) * spacing;
  return T(static_cast<float>(std::fabs(result) > Format<T>::kMax ? std::copysign(INFINITY, result) : result));
}

template <class T>
std::vector<double> to_doubles(const std::vector<T>& values) {
  std::vector<double> result;
  for (const T& value : values) {
    result.push_back(to_double(value));
  }
  return result;
}

template <class T>
std::vector<T> rounded(const std::vector<double>& values) {
  std::vector<T> result;
  for (const double value : values) {
    result.push_back(rounded<T>(value));
  }
  return result;
}

// An exact result, and the sum of the absolute values that were added up to get it.
struct Exact {
  std::vector<double> values, terms;
};

// The largest error over what is allowed: ulps of T plus relative * terms, element by element. An infinity is
// right where the exact value rounds to it; it and a finite number may stand for one another only within the
// allowance.
template <class T>
double worst_ratio(const std::vector<double>& got, const Exact& exact, double ulps, double relative) {
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double want = exact.values[i];
    const double allowed = ulps * ulp<T>(want) + relative * exact.terms[i];
    double error = std::fabs(got[i] - want);
    if (std::isinf(got[i]) && got[i] * want > 0) {
      error = std::max(0.0, Format<T>::kMax + ulp<T>(Format<T>::kMax) / 2 - std::fabs(want));
    }
    const double ratio = error == 0 ? 0 : error / allowed;
    worst = std::isnan(ratio) ? INFINITY : std::max(worst, ratio);
  }
  return worst;
}

// || got - want || over || want || + || terms || * of_terms: below `relative` is right for an fp32 result.
inline double l2_ratio(const std::vector<double>& got, const Exact& exact, double relative, double of_terms) {
  double error = 0, size = 0, terms = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(got[i] - exact.values[i], 2);
    size += std::pow(exact.values[i], 2);
    terms += std::pow(exact.terms[i], 2);
  }
  if (error == 0) {
    return 0;
  }
  const double ratio = std::sqrt(error) / (relative * std::sqrt(size) + of_terms * std::sqrt(terms));
  return std::isnan(ratio) ? INFINITY : ratio;
}

// Small, and the same numbers everywhere (std's distributions differ between libraries).
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u + 12345u) {}
  double uniform() {  // (-1, 1)
    state_ = state_ * 1664525u + 1013904223u;
    return (static_cast<double>(state_ >> 8) + 0.5) / (1 << 23) - 1;
  }
  double normal() {  // near enough: the sum of 12 uniforms
    double sum = 0;
    for (int i = 0; i < 12; ++i) {
      sum += uniform();
    }
    return sum / 2;
  }

 private:
  uint32_t state_;
};

}  // namespace allfinite::simt
