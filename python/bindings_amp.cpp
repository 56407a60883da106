// The policy of the loss scale, and the words for what a step did. The Python GradScaler is Python: it adapts
// Python optimizers, and its tensor maths are ops.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <sstream>
#include <utility>

#include "allfinite/amp/scale_policy.h"
#include "allfinite/amp/step_result.h"
#include "bindings.h"

namespace allfinite::python {
namespace {

namespace py = pybind11;
using amp::ScalePolicy;
using amp::SkipReason;
using amp::StepStatus;

std::string repr(const ScalePolicy& policy) {
  std::ostringstream out;
  out << "ScalePolicy(growth_factor=" << policy.growth_factor() << ", backoff_factor=" << policy.backoff_factor()
      << ", growth_interval=" << policy.growth_interval() << ", min_scale=" << policy.min_scale()
      << ", max_scale=" << policy.max_scale() << ")";
  return out.str();
}

py::tuple state(const ScalePolicy& policy) {
  return py::make_tuple(policy.growth_factor(), policy.backoff_factor(), policy.growth_interval(), policy.min_scale(),
                        policy.max_scale());
}

ScalePolicy from_state(const py::tuple& values) {
  return ScalePolicy(values[0].cast<double>(), values[1].cast<double>(), values[2].cast<int64_t>(),
                     values[3].cast<double>(), values[4].cast<double>());
}

std::pair<double, int64_t> next(const ScalePolicy& policy, double scale, int64_t growth_tracker, bool found_inf) {
  const auto after = policy.next({scale, growth_tracker}, found_inf);
  return {after.scale, after.growth_tracker};
}

}  // namespace

void bind_amp(py::module_& m) {
  const ScalePolicy defaults;
  py::class_<ScalePolicy>(
      m, "ScalePolicy",
      "How a loss scale moves: its hyper-parameters, validated, and the step to the next scale.\n\n"
      "growth_factor is finite and > 1, backoff_factor in (0, 1), growth_interval >= 1, min_scale <= "
      "max_scale, both in [2^-126, 2^126]; ValueError otherwise, and nothing is changed.")
      .def(py::init<double, double, int64_t, double, double>(), py::arg("growth_factor") = defaults.growth_factor(),
           py::arg("backoff_factor") = defaults.backoff_factor(),
           py::arg("growth_interval") = defaults.growth_interval(), py::arg("min_scale") = defaults.min_scale(),
           py::arg("max_scale") = defaults.max_scale())
      .def_property("growth_factor", &ScalePolicy::growth_factor, &ScalePolicy::set_growth_factor)
      .def_property("backoff_factor", &ScalePolicy::backoff_factor, &ScalePolicy::set_backoff_factor)
      .def_property("growth_interval", &ScalePolicy::growth_interval, &ScalePolicy::set_growth_interval)
      .def_property("min_scale", &ScalePolicy::min_scale, &ScalePolicy::set_min_scale)
      .def_property("max_scale", &ScalePolicy::max_scale, &ScalePolicy::set_max_scale)
      .def("next", &next, py::arg("scale"), py::arg("growth_tracker"), py::arg("found_inf"),
           "(scale, growth_tracker) after an iteration, by the arithmetic of torch.ops.allfinite.update_scale_.\n\n"
           "Raises ValueError for a scale that is not finite and > 0, and for a negative tracker.")
      .def_static("check_scale", &ScalePolicy::check_scale, py::arg("name"), py::arg("value"),
                  "value rounded to float32. Raises ValueError, naming `name`, unless it is finite and > 0 then.")
      .def_static("check_tracker", &ScalePolicy::check_tracker, py::arg("value"),
                  "value. Raises ValueError unless it lies in [0, 2^31 - 1).")
      .def(py::self == py::self)
      .def("__repr__", &repr)
      .def(py::pickle(&state, &from_state));
  // The words of StepResult.status and StepResult.reason, for the check that Python and C++ use the same.
  m.attr("STEP_STATUSES") = py::make_tuple(to_string(StepStatus::Stepped), to_string(StepStatus::Skipped),
                                           to_string(StepStatus::NoGradients));
  m.attr("SKIP_REASONS") =
      py::make_tuple(to_string(SkipReason::Inf), to_string(SkipReason::NaN), to_string(SkipReason::AfterUnscale));
}

}  // namespace allfinite::python
