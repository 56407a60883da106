// Unscaling gradients in place: arguments of the CPU kernel (what it computes: unscale_and_check.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

struct UnscaleArgs {
  void* data;             // count numbers of dtype, stride numbers apart
  int64_t count, stride;  // stride 1: contiguous
  DType dtype;
  double inv_scale;  // rounded to fp32 first, but for fp64 and where fp32 would lose bits
  bool* found_inf;   // set to true where a result is not finite; never cleared
};

ALLFINITE_CPU_KERNEL(unscale_and_check, UnscaleArgs)

}  // namespace allfinite::cpu
