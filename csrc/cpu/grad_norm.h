// The p-norm of gradients: arguments of the CPU kernel (what it computes: grad_norm.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

// Over some numbers; both fields start at 0.
struct PowerSums {
  double powers;      // sum of |value * scale|^order; nothing is added for an infinite order
  int64_t magnitude;  // the bits of the largest |value| as a double: NaN is larger than infinity
};

struct GradNormArgs {
  const void* data;       // count numbers of dtype, stride numbers apart
  int64_t count, stride;  // stride 1: contiguous
  DType dtype;
  double order;     // > 0, or infinite
  double scale;     // a power of two: 1, or what brings the powers into double's range
  PowerSums* sums;  // added to
};

ALLFINITE_CPU_KERNEL(grad_norm, GradNormArgs)

}  // namespace allfinite::cpu
