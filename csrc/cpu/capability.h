// Which instruction set the CPU kernels run with: chosen once, at the first call.
//
// ALLFINITE_CPU_CAPABILITY=baseline|avx2|avx512 forces one (for tests); a name that is unknown, not built or
// not supported by this processor is an error at the first use, never a silent fallback.
#pragma once
#include <cstdint>

namespace allfinite::cpu {

enum class Capability : int { kBaseline, kAvx2, kAvx512 };

// Throws std::runtime_error when ALLFINITE_CPU_CAPABILITY cannot be honoured.
Capability capability();
const char* capability_name(Capability capability);

}  // namespace allfinite::cpu

// Declares a kernel `void name(const Args&)` in each instruction set's namespace, and `name(args)` in
// allfinite::cpu, which runs the chosen one.
#if defined(__x86_64__)
#define ALLFINITE_CPU_KERNEL(name, Args)                                                                              \
  namespace baseline {                                                                                                \
  void name(const Args&);                                                                                             \
  }                                                                                                                   \
  namespace avx2 {                                                                                                    \
  void name(const Args&);                                                                                             \
  }                                                                                                                   \
  namespace avx512 {                                                                                                  \
  void name(const Args&);                                                                                             \
  }                                                                                                                   \
  inline void name(const Args& args) {                                                                                \
    const Capability chosen = capability();                                                                           \
    (chosen == Capability::kAvx512 ? avx512::name : chosen == Capability::kAvx2 ? avx2::name : baseline::name)(args); \
  }
#else
#define ALLFINITE_CPU_KERNEL(name, Args) \
  namespace baseline {                   \
  void name(const Args&);                \
  }                                      \
  inline void name(const Args& args) {   \
    baseline::name(args);                \
  }
#endif
