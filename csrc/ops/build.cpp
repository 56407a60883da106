// Answers about the build: include/allfinite/build.h.
#include "allfinite/build.h"

#include "cpu/capability.h"

namespace allfinite {

std::string cpu_capability() {
  return cpu::capability_name(cpu::capability());
}

bool cuda_built() {
#if defined(ALLFINITE_CUDA)
  return true;
#else
  return false;
#endif
}

std::string version() {
  return ALLFINITE_VERSION;
}

}  // namespace allfinite
