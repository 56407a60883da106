// Storage types of the CPU kernels, and what an argument struct calls them. Torch-free; bit-compatible with
// torch's c10::Half and c10::BFloat16.
#pragma once
#include <cstdint>

namespace allfinite::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };

}  // namespace allfinite::cpu
