// layer_norm on CUDA: from tensors to the launchers of cuda/layer_norm.h. fp64 goes through torch expressions.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "cuda/layer_norm.h"
#include "ops/check.h"
#include "ops/cuda_dtype.h"
#include "ops/layer_norm_reference.h"
#include "ops/norm_affine.h"
#include "ops/op.h"

namespace allfinite {
namespace {

constexpr char kOp[] = "allfinite::layer_norm";

// A pointer of another device would be read without an error: the inner ops can be called directly, so they check.
void check_devices(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias) {
  if (weight) {
    check::same_device(kOp, "weight", *weight, "input", input);
  }
  if (bias) {
    check::same_device(kOp, "bias", *bias, "input", input);
  }
}

void* pointer(const Tensor& t) {
  return t.defined() ? t.data_ptr() : nullptr;
}

cuda::DType dtype_or(const Tensor& t, cuda::DType otherwise) {
  return t.defined() ? cuda_dtype(t.scalar_type()) : otherwise;
}

// The product of the leading sizes, which is right for rows of no elements as well.
int64_t row_count(const Tensor& input, int64_t ndim) {
  return c10::multiply_integers(input.sizes().slice(0, input.dim() - ndim));
}

std::tuple<Tensor, Tensor> forward_cuda(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                        int64_t ndim, double eps) {
  check_devices(input, weight, bias);
  const c10::cuda::CUDAGuard guard(input.device());
  if (input.scalar_type() == at::kDouble) {
    return reference::layer_norm_forward(input, weight, bias, ndim, eps);
  }
  const Tensor output = at::empty(input.sizes(), input.options());
  auto stats_shape = input.sizes().slice(0, input.dim() - ndim).vec();
  stats_shape.push_back(cuda::kLayerNormStats);
  const Tensor stats = at::empty(stats_shape, input.options().dtype(at::kFloat));
  if (input.numel() == 0) {
    stats.zero_();
    return {output, stats};
  }
  const Tensor x = input.contiguous();
  const Affine affine(input, weight, bias);
  cuda::LayerNormForwardParams params{};
  params.x = x.const_data_ptr();
  params.weight = Affine::pointer(affine.weight);
  params.bias = Affine::pointer(affine.bias);
  params.y = output.data_ptr();
  params.stats = stats.data_ptr<float>();
  params.rows = row_count(input, ndim);
  params.n = input.numel() / params.rows;
  params.eps = eps;
  params.dtype = cuda_dtype(input.scalar_type());
  params.weight_dtype = cuda_dtype(affine.dtype);
  C10_CUDA_CHECK(cuda::layer_norm_forward(params, c10::cuda::getCurrentCUDAStream()));
  return {output, stats};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                                                 const OptionalTensor& bias, const Tensor& stats, int64_t ndim,
                                                 std::array<bool, 3> output_mask) {
  check_devices(input, weight, bias);
  check::same_device(kOp, "grad", grad, "input", input);
  check::same_device(kOp, "stats", stats, "input", input);
  const c10::cuda::CUDAGuard guard(input.device());
  const Tensor dy = grad.to(input.scalar_type()).contiguous();
  if (input.scalar_type() == at::kDouble) {
    return reference::layer_norm_backward(dy, input, weight, bias, stats, ndim, output_mask);
  }
  const auto like = [](const Tensor& t) { return at::empty(t.sizes(), t.options()); };
  const Tensor dx = output_mask[0] ? like(input) : Tensor();
  const Tensor dweight = output_mask[1] && weight ? like(*weight) : Tensor();
  const Tensor dbias = output_mask[2] && bias ? like(*bias) : Tensor();
  const Tensor x = input.contiguous(), saved_stats = stats.contiguous();
  const Affine affine(input, weight, std::nullopt);
  cuda::LayerNormBackwardParams params{};
  params.rows = row_count(input, ndim);
  params.n = c10::multiply_integers(input.sizes().slice(input.dim() - ndim));
  const Tensor workspace =
      dweight.defined() || dbias.defined()
          ? at::empty({cuda::layer_norm_backward_workspace(params.rows, params.n)}, input.options().dtype(at::kDouble))
          : Tensor();
  params.dy = dy.const_data_ptr();
  params.x = x.const_data_ptr();
  params.weight = Affine::pointer(affine.weight);
  params.stats = saved_stats.const_data_ptr<float>();
  params.dx = pointer(dx);
  params.dweight = pointer(dweight);
  params.dbias = pointer(dbias);
  params.workspace = static_cast<double*>(pointer(workspace));
  params.dtype = cuda_dtype(input.scalar_type());
  params.weight_dtype = cuda_dtype(affine.dtype);
  params.dweight_dtype = dtype_or(dweight, params.dtype);
  params.dbias_dtype = dtype_or(dbias, params.dtype);
  C10_CUDA_CHECK(cuda::layer_norm_backward(params, c10::cuda::getCurrentCUDAStream()));
  return {dx, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CUDA, m) {
  m.impl("_layer_norm_forward", forward_cuda);
  m.impl("_layer_norm_backward", backward_cuda);
}

}  // namespace allfinite
