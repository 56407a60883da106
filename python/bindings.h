// One function a topic; each adds its classes or functions to the module. bind_errors comes first.
#pragma once
#include <pybind11/pybind11.h>

namespace allfinite::python {

void bind_amp(pybind11::module_& m);
void bind_build(pybind11::module_& m);
void bind_errors();
void bind_ops(pybind11::module_& m);

}  // namespace allfinite::python
