#include "cpu/capability.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace allfinite::cpu {
namespace {

constexpr Capability kAll[] = {Capability::kBaseline, Capability::kAvx2, Capability::kAvx512};

bool supported(Capability capability) {
#if defined(__x86_64__)
  switch (capability) {
    case Capability::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Capability::kAvx2:
      // Every processor with AVX2 that was ever sold has F16C as well; g++ 12 has no name to ask for it.
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Capability::kBaseline:
      return true;
  }
#endif
  return capability == Capability::kBaseline;
}

Capability choose() {
  const char* forced = std::getenv("ALLFINITE_CPU_CAPABILITY");
  if (forced && *forced) {
    for (Capability candidate : kAll) {
      if (std::string(forced) == capability_name(candidate) && supported(candidate)) {
        return candidate;
      }
    }
    std::string expected;
    for (Capability candidate : kAll) {
      if (supported(candidate)) {
        expected += (expected.empty() ? "" : ", ") + std::string(capability_name(candidate));
      }
    }
    throw std::runtime_error("allfinite: expected ALLFINITE_CPU_CAPABILITY to be one of " + expected +
                             " on this processor, but got " + forced);
  }
  Capability best = Capability::kBaseline;
  for (Capability candidate : kAll) {
    if (supported(candidate)) {
      best = candidate;
    }
  }
  return best;
}

}  // namespace

Capability capability() {
  static const Capability chosen = choose();
  return chosen;
}

const char* capability_name(Capability capability) {
  switch (capability) {
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    case Capability::kBaseline:
      break;
  }
  return "baseline";
}

}  // namespace allfinite::cpu
