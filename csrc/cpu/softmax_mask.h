// The rows of softmax's mask, as numbers that are added to the scores.
//
// A row that is fp32 (fp64) already is used where it lies; others are widened to a buffer in L1, once for as many rows
// in a row as share it.
#pragma once
#include "cpu/simd.h"
#include "cpu/softmax.h"
#include "cpu/visit.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

// Rows of a mask as numbers of A to be added; one that serves several rows in a row is made once.
template <class A>
class MaskRows {
 public:
  MaskRows(const SoftmaxMask& mask, A* buffer, int64_t n) : mask_(mask), buffer_(buffer), n_(n) {}

  const A* row(int64_t index) {
    if (!mask_.data) {
      return nullptr;
    }
    int64_t offset = 0;
    for (int d = mask_.dims - 1; d >= 0; --d) {
      offset += index % mask_.size[d] * mask_.stride[d];
      index /= mask_.size[d];
    }
    constexpr DType own = std::is_same_v<A, float> ? DType::kFloat32 : DType::kFloat64;
    if (!mask_.is_bool && mask_.dtype == own && mask_.step == 1) {
      return static_cast<const A*>(mask_.data) + offset;
    }
    if (offset != last_) {
      fill(offset);
      last_ = offset;
    }
    return buffer_;
  }

 private:
  void fill(int64_t offset) {
    if (mask_.is_bool) {
      const uint8_t* from = static_cast<const uint8_t*>(mask_.data) + offset;
      const auto with_step = [&](int64_t step) __attribute__((always_inline)) {
        for (int64_t i = 0; i < n_; ++i) {
          buffer_[i] = from[i * step] ? A(0) : -kInfinity<A>;
        }
      };
      mask_.step == 1 ? with_step(1) : with_step(mask_.step);  // a constant, so that it becomes vectors
      return;
    }
    visit_dtype(mask_.dtype, [&](auto tag) {
      using M = typename decltype(tag)::type;
      const M* from = static_cast<const M*>(mask_.data) + offset;
      int64_t i = 0;
      if constexpr (std::is_same_v<A, float> && !std::is_same_v<M, double>) {
        for (; mask_.step == 1 && i + kWidth<A> <= n_; i += kWidth<A>) {
          store(buffer_ + i, load<A>(from + i));
        }
      }
      for (; i < n_; ++i) {
        buffer_[i] = widen<A>(from[i * mask_.step]);
      }
    });
  }

  const SoftmaxMask& mask_;
  A* buffer_;
  int64_t n_;
  int64_t last_ = -1;
};

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
