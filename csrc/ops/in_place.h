// Autograd and ADInplaceOrView kernels of ops that return nothing and write to some of their arguments.
//
// Not torch's boxed fallbacks: those count a write only where the tensor is also returned, and without the count a
// graph that saved the old values would take the new ones, and its gradients would be silently wrong.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

namespace allfinite {

// Autograd: refuses tensors that take part in a graph, then goes on to the ADInplaceOrView kernel.
template <class Run>
void outside_graphs(const char* op, at::TensorList written, Run run) {
  for (const at::Tensor& t : written) {
    TORCH_CHECK_NOT_IMPLEMENTED(!(t.requires_grad() && c10::GradMode::is_enabled()), op,
                                ": expected tensors without gradient or torch.no_grad(), because a write in place "
                                "is not differentiable here, but got one that requires grad");
    TORCH_CHECK_NOT_IMPLEMENTED(!t._fw_grad(/*level=*/0).defined(), op,
                                ": expected tensors without a forward-mode tangent, but got one that has it");
  }
  at::AutoDispatchBelowAutograd below;
  run();
}

// ADInplaceOrView: runs the kernel and counts the writes.
template <class Run>
void counting_writes(at::TensorList written, Run run) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    run();
  }
  for (const at::Tensor& t : written) {
    if (!t.is_inference()) {  // those have no version
      t.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace allfinite
