// Statistics of gradients in one read: arguments of the CPU kernel (what it computes: grad_stats.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

// Sums over some numbers; all fields start at 0.
struct GradSums {
  double squares;     // of value * scale
  int64_t magnitude;  // the bits of the largest |value| as a double: NaN is larger than infinity
  int64_t zeros;
  int64_t subnormals;
};

struct GradStatsArgs {
  const void* data;       // count numbers of dtype, stride numbers apart
  int64_t count, stride;  // stride 1: contiguous
  DType dtype;
  double scale;    // a power of two: 1, or what brings the squares into double's range
  GradSums* sums;  // added to
};

ALLFINITE_CPU_KERNEL(grad_stats, GradStatsArgs)

}  // namespace allfinite::cpu
