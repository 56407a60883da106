// pybind11: what an op's schema cannot express, and short cuts to the ops (torch.ops.allfinite).
// Classes are bound in files of their own, bindings_<topic>.cpp, and listed in bindings.h.
#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "AllFinite's C++ core, apart from its ops";
  allfinite::python::bind_errors();
  allfinite::python::bind_build(m);
  allfinite::python::bind_amp(m);
  allfinite::python::bind_ops(m);
}
