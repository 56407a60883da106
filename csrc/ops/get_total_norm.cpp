// get_total_norm: check, autograd, meta, CPU glue, C++ function.
// Autocast: none is registered, every tensor is read in its own dtype.
#include <ATen/core/Tensor.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "allfinite/ops/gradients.h"
#include "cpu/grad_norm.h"
#include "ops/flat_list.h"
#include "ops/gradient_checks.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::get_total_norm";

using TotalNorm = Tensor(at::TensorList, double);

// --- check -----------------------------------------------------------------------------------------------------------

Tensor get_total_norm_composite(at::TensorList tensors, double norm_type) {
  TORCH_CHECK_VALUE(norm_type > 0, kOp, ": expected norm_type > 0, but got ", norm_type);
  if (tensors.empty()) {  // no tensor, no backend
    return at::zeros({}, at::kDouble);
  }
  check::defined(kOp, "tensors[0]", tensors[0]);
  check::gradients(kOp, "tensors", tensors, "tensors[0]", tensors[0].device());
  static const auto op = find_op<TotalNorm>("allfinite::_get_total_norm");
  if (norm_type == 2) {
    return op.call(tensors, norm_type);
  }
  // Only in the Euclidean norm a complex number counts as its two parts do.
  std::vector<Tensor> real;
  for (const Tensor& t : tensors) {
    real.push_back(t.is_complex() ? at::abs(t) : t);
  }
  return op.call(real, norm_type);
}

// --- meta ------------------------------------------------------------------------------------------------------------

Tensor get_total_norm_meta(at::TensorList tensors, double) {
  return at::empty({}, at::TensorOptions().device(tensors[0].device()).dtype(at::kDouble));
}

// --- CPU -------------------------------------------------------------------------------------------------------------

cpu::PowerSums sum(const FlatList& memory, double order, double scale) {
  const auto partial = memory.sums_of_chunks<cpu::PowerSums>([&](cpu::PowerSums& sums, const Run& run) {
    cpu::grad_norm({run.data, run.count, run.stride, run.dtype, order, scale, &sums});
  });
  cpu::PowerSums total{};
  for (const cpu::PowerSums& sums : partial) {
    total.powers += sums.powers;
    total.magnitude = std::max(total.magnitude, sums.magnitude);
  }
  return total;
}

double root(double powers, double order) {
  return order == 2 ? std::sqrt(powers) : order == 1 ? powers : std::pow(powers, 1 / order);
}

double norm_of(const FlatList& memory, double order) {
  const cpu::PowerSums sums = sum(memory, order, 1);
  double largest = 0;
  std::memcpy(&largest, &sums.magnitude, sizeof largest);
  if (largest == 0 || !std::isfinite(largest) || std::isinf(order)) {
    return largest;
  }
  // What lies 2^-1074 below the largest power is not in the sum; up to 2^63 of them must not leave the range.
  const double exponent = order * std::log2(largest);
  if (exponent >= -800 && exponent <= 950) {
    return root(sums.powers, order);
  }
  const int shift = std::clamp(std::ilogb(largest), -1000, 1000);
  return std::ldexp(root(sum(memory, order, std::ldexp(1.0, -shift)).powers, order), shift);
}

Tensor get_total_norm_cpu(at::TensorList tensors, double norm_type) {
  Tensor norm = get_total_norm_meta(tensors, norm_type);
  *norm.mutable_data_ptr<double>() = norm_of(FlatList::all_elements(tensors), norm_type);
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("get_total_norm", get_total_norm_composite);
}
TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("_get_total_norm", torch::autograd::autogradNotImplementedFallback());
}
// Magnitudes know no sign, so the memory behind a lazy view is read as it is.
TORCH_LIBRARY_IMPL(allfinite, Conjugate, m) {
  m.impl("_get_total_norm", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Negative, m) {
  m.impl("_get_total_norm", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("_get_total_norm", get_total_norm_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_get_total_norm", get_total_norm_cpu);
}

Tensor get_total_norm(at::TensorList tensors, double norm_type) {
  static const auto op = find_op<TotalNorm>(kOp);
  return op.call(tensors, norm_type);
}

}  // namespace allfinite
