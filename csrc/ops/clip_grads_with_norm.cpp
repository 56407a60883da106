// clip_grads_with_norm_: check, autograd, meta, CPU, C++ function; and clip_grad_norm_, which is it after
// get_total_norm. Autocast: none is registered, every gradient keeps its dtype.
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "allfinite/ops/gradients.h"
#include "cpu/unscale_and_check.h"
#include "ops/flat_list.h"
#include "ops/gradient_checks.h"
#include "ops/in_place.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::clip_grads_with_norm_";

using Clip = void(at::TensorList, double, const Tensor&);

// --- check, which is all there is to do on meta and sparse tensors ---------------------------------------------------

void check_max_norm(const char* op, double max_norm) {
  TORCH_CHECK_VALUE(max_norm >= 0, op, ": expected max_norm >= 0, but got ", max_norm);
}

void check_arguments(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  check_max_norm(kOp, max_norm);
  check::floating(kOp, "total_norm", total_norm);
  check::strided(kOp, "total_norm", total_norm);
  TORCH_CHECK_VALUE(total_norm.sym_numel() == 1, kOp, ": expected total_norm of one element, but got shape ",
                    total_norm.sym_sizes());
  check::gradients(kOp, "grads", grads, "total_norm", total_norm.device());
}

void clip_meta(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  check_arguments(grads, max_norm, total_norm);
}

// --- autograd: not differentiable; writes are counted ----------------------------------------------------------------

void clip_autograd(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  outside_graphs(kOp, grads, [&] { clip_grads_with_norm_(grads, max_norm, total_norm); });
}

void clip_counted(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  counting_writes(grads, [&] { clip_grads_with_norm_(grads, max_norm, total_norm); });
}

// --- CPU -------------------------------------------------------------------------------------------------------------

void clip_cpu(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  check_arguments(grads, max_norm, total_norm);
  const FlatList memory = FlatList::distinct_memory(kOp, grads);
  const double norm = total_norm.item<double>();
  const double factor = max_norm / (norm + 1e-6);  // torch's formula
  if (!std::isfinite(norm) || !(factor < 1)) {
    return;
  }
  memory.in_parallel([&](int64_t begin, int64_t end) {
    bool unused = false;
    memory.visit(begin, end, [&](const Run& run) {
      cpu::unscale_and_check({run.data, run.count, run.stride, run.dtype, factor, &unused});
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("clip_grads_with_norm_", clip_autograd);
}
TORCH_LIBRARY_IMPL(allfinite, ADInplaceOrView, m) {
  m.impl("clip_grads_with_norm_", clip_counted);
}
// A real factor commutes with both, so the memory behind a lazy view is scaled as it is.
TORCH_LIBRARY_IMPL(allfinite, Conjugate, m) {
  m.impl("clip_grads_with_norm_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Negative, m) {
  m.impl("clip_grads_with_norm_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("clip_grads_with_norm_", clip_meta);
}
TORCH_LIBRARY_IMPL(allfinite, SparseCPU, m) {
  m.impl("clip_grads_with_norm_", clip_meta);
}
TORCH_LIBRARY_IMPL(allfinite, SparseCsrCPU, m) {
  m.impl("clip_grads_with_norm_", clip_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("clip_grads_with_norm_", clip_cpu);
}

void clip_grads_with_norm_(at::TensorList grads, double max_norm, const Tensor& total_norm) {
  static const auto op = find_op<Clip>(kOp);
  op.call(grads, max_norm, total_norm);
}

Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  constexpr char kClip[] = "allfinite::clip_grad_norm_";
  check_max_norm(kClip, max_norm);
  const c10::NoGradGuard no_grad;
  std::vector<Tensor> grads;
  for (const Tensor& parameter : parameters) {
    check::defined(kClip, "each of parameters", parameter);
    if (parameter.grad().defined()) {
      grads.push_back(parameter.grad());
    }
  }
  const Tensor norm = get_total_norm(grads, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm.item<double>()), kClip, ": expected a finite norm of order ",
              norm_type, ", but got ", norm.item<double>(), "; nothing was clipped");
  if (!grads.empty()) {
    clip_grads_with_norm_(grads, max_norm, norm);
  }
  return norm;
}

}  // namespace allfinite
