// unscale_and_check_: check, autograd, meta, CPU glue, C++ function.
// Autocast: none is registered, every gradient keeps its dtype.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "allfinite/ops/gradients.h"
#include "cpu/unscale_and_check.h"
#include "ops/flat_list.h"
#include "ops/gradient_checks.h"
#include "ops/in_place.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::unscale_and_check_";

using Unscale = void(at::TensorList, Tensor&, const Tensor&);

// --- check, which is all there is to do on meta and sparse tensors ---------------------------------------------------

void check_arguments(at::TensorList grads, const Tensor& found_inf, const Tensor& inv_scale) {
  check::one_number(kOp, "found_inf", found_inf, at::kFloat);
  check::one_number(kOp, "inv_scale", inv_scale, at::kFloat);
  check::same_device(kOp, "inv_scale", inv_scale, "found_inf", found_inf);
  check::gradients(kOp, "grads", grads, "found_inf", found_inf.device());
}

void unscale_and_check_meta(at::TensorList grads, Tensor& found_inf, const Tensor& inv_scale) {
  check_arguments(grads, found_inf, inv_scale);
}

// --- autograd: not differentiable; writes are counted ----------------------------------------------------------------

void unscale_and_check_autograd(at::TensorList grads, Tensor& found_inf, const Tensor& inv_scale) {
  outside_graphs(kOp, grads, [&] { unscale_and_check_(grads, found_inf, inv_scale); });
}

void unscale_and_check_counted(at::TensorList grads, Tensor& found_inf, const Tensor& inv_scale) {
  counting_writes(grads, [&] { counting_writes(found_inf, [&] { unscale_and_check_(grads, found_inf, inv_scale); }); });
}

// --- CPU -------------------------------------------------------------------------------------------------------------

void unscale_and_check_cpu(at::TensorList grads, Tensor& found_inf, const Tensor& inv_scale) {
  check_arguments(grads, found_inf, inv_scale);
  const float inverse = *inv_scale.const_data_ptr<float>();
  const FlatList memory = FlatList::distinct_memory(kOp, grads);
  std::atomic<bool> found{false};
  memory.in_parallel([&](int64_t begin, int64_t end) {
    bool found_here = false;
    memory.visit(begin, end, [&](const Run& run) {
      cpu::unscale_and_check({run.data, run.count, run.stride, run.dtype, inverse, &found_here});
    });
    if (found_here) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  if (found) {
    *found_inf.mutable_data_ptr<float>() = 1;
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, Autograd, m) {
  m.impl("unscale_and_check_", unscale_and_check_autograd);
}
TORCH_LIBRARY_IMPL(allfinite, ADInplaceOrView, m) {
  m.impl("unscale_and_check_", unscale_and_check_counted);
}
// A real factor commutes with both, so the memory behind a lazy view is scaled as it is.
TORCH_LIBRARY_IMPL(allfinite, Conjugate, m) {
  m.impl("unscale_and_check_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Negative, m) {
  m.impl("unscale_and_check_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(allfinite, Meta, m) {
  m.impl("unscale_and_check_", unscale_and_check_meta);
}
TORCH_LIBRARY_IMPL(allfinite, SparseCPU, m) {
  m.impl("unscale_and_check_", unscale_and_check_meta);
}
TORCH_LIBRARY_IMPL(allfinite, SparseCsrCPU, m) {
  m.impl("unscale_and_check_", unscale_and_check_meta);
}
TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("unscale_and_check_", unscale_and_check_cpu);
}

void unscale_and_check_(at::TensorList grads, const Tensor& found_inf, const Tensor& inv_scale) {
  static const auto op = find_op<Unscale>(kOp);
  Tensor found = found_inf;
  op.call(grads, found, inv_scale);
}

}  // namespace allfinite
