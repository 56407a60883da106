// What this build of AllFinite runs with.
#pragma once
#include <string>

#include "allfinite/export.h"

namespace allfinite {

// The instruction set of the CPU kernels: "baseline", "avx2" or "avx512"; the best one that this processor
// has, or the one that ALLFINITE_CPU_CAPABILITY names (std::runtime_error if it is not there).
ALLFINITE_API std::string cpu_capability();

// Whether the CUDA half is in this build.
ALLFINITE_API bool cuda_built();

// "0.1.0"
ALLFINITE_API std::string version();

}  // namespace allfinite
