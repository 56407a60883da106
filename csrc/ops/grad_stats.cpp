// grad_stats: check, autograd, meta, CPU glue, C++ function.
// Autocast: none is registered, every gradient is read in its own dtype.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "allfinite/ops/gradients.h"
#include "cpu/grad_stats.h"
#include "ops/flat_list.h"
#include "ops/gradient_checks.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::grad_stats";

using Stats = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// --- check -----------------------------------------------------------------------------------------------------------

Stats grad_stats_composite(at::TensorList grads) {
  if (grads.empty()) {  // no tensor, no backend
    const auto zero = [](at::ScalarType dtype) { return at::zeros({}, dtype); };
    return {zero(at::kFloat), zero(at::kDouble), zero(at::kDouble), zero(at::kLong), zero(at::kLong)};
  }
  check::gradients(kOp, "grads", grads, "grads[0]", grads[0].device());
  static const auto op = find_op<Stats(at::TensorList)>("allfinite::_grad_stats");
  return op.call(grads);
}

// --- meta ------------------------------------------------------------------------------------------------------------

Stats grad_stats_meta(at::TensorList grads) {
  const auto number = [&](at::ScalarType dtype) {
    return at::empty({}, at::TensorOptions().device(grads[0].device()).dtype(dtype));
  };
  return {number(at::kFloat), number(at::kDouble), number(at::kDouble), number(at::kLong), number(at::kLong)};
}

// --- CPU -------------------------------------------------------------------------------------------------------------

cpu::GradSums sum(const FlatList& memory, double scale) {
  const auto partial = memory.sums_of_chunks<cpu::GradSums>([&](cpu::GradSums& sums, const Run& run) {
    cpu::grad_stats({run.data, run.count, run.stride, run.dtype, scale, &sums});
  });
  cpu::GradSums total{};
  for (const cpu::GradSums& sums : partial) {
    total.squares += sums.squares;
    total.magnitude = std::max(total.magnitude, sums.magnitude);
    total.zeros += sums.zeros;
    total.subnormals += sums.subnormals;
  }
  return total;
}

// The norm from the sums, and from a second read where the squares of an fp64 tensor left double's range.
double norm_of(const FlatList& memory, double squares, double amax) {
  const bool in_range = amax <= 0x1p450 && amax >= 0x1p-400;
  if (in_range || amax == 0 || !std::isfinite(amax)) {
    return std::sqrt(squares);
  }
  const int exponent = std::clamp(std::ilogb(amax), -1000, 1000);
  return std::ldexp(std::sqrt(sum(memory, std::ldexp(1.0, -exponent)).squares), exponent);
}

Stats grad_stats_cpu(at::TensorList grads) {
  const FlatList memory = FlatList::all_elements(grads);
  const cpu::GradSums sums = sum(memory, 1);
  double amax = 0;
  std::memcpy(&amax, &sums.magnitude, sizeof amax);
  auto result = grad_stats_meta(grads);
  const auto& [found_inf, norm, largest, zeros, subnormals] = result;
  *found_inf.mutable_data_ptr<float>() = std::isfinite(amax) ? 0 : 1;
  *norm.mutable_data_ptr<double>() = norm_of(memory, sums.squares, amax);
  *largest.mutable_data_ptr<double>() = amax;
  *zeros.mutable_data_ptr<int64_t>() = sums.zeros;
  *subnormals.mutable_data_ptr<int64_t>() = sums.subnormals;
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("grad_stats", grad_stats_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_grad_stats", torch::autograd::autogradNotImplementedFallback());
}
// Magnitudes know no sign, so the memory behind a lazy view is read as it is.
TORCH_LIBRARY_IMPL(allfinite, Conjugate, m) {
  m.impl("_grad_stats", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Negative, m) {
  m.impl("_grad_stats", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_grad_stats", grad_stats_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_grad_stats", grad_stats_cpu);
}

GradStats grad_stats(at::TensorList grads) {
  static const auto op = find_op<Stats(at::TensorList)>(kOp);
  const auto [found_inf, norm, amax, zeros, subnormals] = op.call(grads);
  return {found_inf, norm, amax, zeros, subnormals};
}

}  // namespace allfinite
