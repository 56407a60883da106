// From tensors to the argument structs of the norm kernels: contiguous inputs, empty tensors, one dtype of parameters.
#include "ops/norm_tensors.h"

#include "ops/cpu_dtype.h"
#include "ops/norm_affine.h"
#include "ops/norm_cpu.h"

namespace allfinite {
namespace {

const void* source(const Tensor& t) {
  return t.defined() ? t.const_data_ptr() : nullptr;
}

void* target(const Tensor& t) {
  return t.defined() ? t.data_ptr() : nullptr;
}

cpu::DType dtype_or(const Tensor& t, cpu::DType otherwise) {
  return t.defined() ? cpu_dtype(t.scalar_type()) : otherwise;
}

Tensor contiguous(const Tensor& t) {
  return t.defined() ? t.contiguous() : t;
}

int64_t row_count(const Tensor& stats, bool rms) {
  return stats.numel() / cpu::norm_stats(rms);
}

}  // namespace

void norm_forward_cpu(const NormForward& norm) {
  if (norm.input.numel() == 0) {
    norm.stats.zero_();
    return;
  }
  const int64_t rows = row_count(norm.stats, norm.rms);
  const Tensor x = norm.input.contiguous(), residual = contiguous(norm.residual);
  const Affine affine(norm.input, norm.weight, norm.bias);
  cpu::NormForwardArgs args{};
  args.x = x.const_data_ptr();
  args.residual = source(residual);
  args.sum = target(norm.sum);
  args.weight = source(affine.weight);
  args.bias = source(affine.bias);
  args.y = norm.output.data_ptr();
  args.stats = norm.stats.data_ptr();
  args.n = norm.input.numel() / rows;
  args.eps = norm.eps;
  args.rms = norm.rms;
  args.dtype = cpu_dtype(norm.input.scalar_type());
  args.weight_dtype = cpu_dtype(affine.dtype);
  args.residual_dtype = dtype_or(residual, args.dtype);
  run_norm_forward(args, rows);
}

void norm_backward_cpu(const NormBackward& norm) {
  if (norm.x.numel() == 0) {
    for (const Tensor& t : {norm.dweight, norm.dbias}) {
      if (t.defined()) {
        t.zero_();
      }
    }
    return;
  }
  const int64_t rows = row_count(norm.stats, norm.rms);
  const Tensor dy = norm.grad.contiguous(), dsum = contiguous(norm.grad_sum);
  const Tensor x = norm.x.contiguous(), stats = norm.stats.contiguous();
  const Affine affine(dy, norm.weight, std::nullopt);
  cpu::NormBackwardArgs args{};
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.weight = source(affine.weight);
  args.stats = stats.const_data_ptr();
  args.dsum = source(dsum);
  args.dx = target(norm.dx);
  args.dresidual = target(norm.dresidual);
  args.n = norm.x.numel() / rows;
  args.rms = norm.rms;
  args.dtype = cpu_dtype(dy.scalar_type());
  args.weight_dtype = cpu_dtype(affine.dtype);
  args.x_dtype = cpu_dtype(x.scalar_type());
  run_norm_backward(args, rows, norm.dweight, norm.dbias);
}

}  // namespace allfinite
