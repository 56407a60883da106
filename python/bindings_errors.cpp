// Errors of the library as the Python exceptions that torch.ops raises for them, without C++ backtraces.
#include <c10/util/Exception.h>

#include <exception>

#include "bindings.h"

namespace allfinite::python {
namespace {

void translate(std::exception_ptr error) {
  if (!error)
    return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    PyErr_SetString(PyExc_IndexError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

}  // namespace

void bind_errors() {
  pybind11::register_local_exception_translator(&translate);
}

}  // namespace allfinite::python
