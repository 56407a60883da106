// What this build runs with.
#include "allfinite/build.h"
#include "bindings.h"

namespace allfinite::python {

void bind_build(pybind11::module_& m) {
  m.def("cpu_capability", &allfinite::cpu_capability,
        "The instruction set that the CPU kernels run with: 'baseline', 'avx2' or 'avx512'.\n\n"
        "Raises RuntimeError when ALLFINITE_CPU_CAPABILITY names one that is not there.");
  m.def("cuda_built", &allfinite::cuda_built, "Whether the CUDA half is in this build.");
}

}  // namespace allfinite::python
