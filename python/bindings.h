// One function a topic; each adds its classes or functions to the module.
#pragma once
#include <pybind11/pybind11.h>

namespace allfinite::python {

void bind_build(pybind11::module_& m);

}  // namespace allfinite::python
