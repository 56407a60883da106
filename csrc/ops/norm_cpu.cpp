// Norm kernels in parallel. Rows are cut into chunks for the column sums; the number of chunks depends on the shape
// alone (F5).
#include "ops/norm_cpu.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

#include "ops/cpu_dtype.h"

namespace allfinite {
namespace {

// At least 32 K elements to a thread, as torch's own grain size.
int64_t grain_rows(int64_t n) {
  return std::max<int64_t>(1, 32768 / n);
}

// kernel(args) with begin, end and scratch of its own, for parts of [0, rows).
template <class Args, class Kernel>
void parallel_rows(const Args& args, int64_t rows, int64_t scratch_bytes, const Kernel& kernel) {
  at::parallel_for(0, rows, grain_rows(args.n), [&](int64_t begin, int64_t end) {
    const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(static_cast<size_t>(scratch_bytes));
    Args part = args;
    part.rows = rows;
    part.begin = begin;
    part.end = end;
    part.scratch = scratch.get();
    kernel(part);
  });
}

}  // namespace

void run_norm_forward(const cpu::NormForwardArgs& args, int64_t rows) {
  parallel_rows(args, rows, cpu::norm_forward_scratch(args.n, args.dtype),
                [](const cpu::NormForwardArgs& part) { cpu::norm_forward(part); });
}

void run_norm_backward(const cpu::NormBackwardArgs& args, int64_t rows, const at::Tensor& dweight,
                       const at::Tensor& dbias) {
  const int64_t n = args.n, scratch_bytes = cpu::norm_backward_scratch(n, args.dtype);
  if (!dweight.defined() && !dbias.defined()) {
    parallel_rows(args, rows, scratch_bytes, [](const cpu::NormBackwardArgs& part) { cpu::norm_backward(part); });
    return;
  }
  const int64_t per_chunk = std::max(cpu::kNormMinChunkRows, at::divup(rows, cpu::kNormMaxChunks));
  const int64_t chunks = at::divup(rows, per_chunk);
  const at::Tensor sums = at::empty({chunks, 2, n}, at::kDouble);
  at::parallel_for(0, chunks, std::max<int64_t>(1, grain_rows(n) / per_chunk), [&](int64_t begin, int64_t end) {
    const at::DataPtr scratch = c10::GetCPUAllocator()->allocate(static_cast<size_t>(scratch_bytes));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      cpu::NormBackwardArgs part = args;
      part.rows = rows;
      part.begin = chunk * per_chunk;
      part.end = std::min(rows, part.begin + per_chunk);
      part.sums = sums.data_ptr<double>() + chunk * 2 * n;
      part.scratch = scratch.get();
      cpu::norm_backward(part);
    }
  });
  cpu::NormColumnsArgs columns{};
  columns.rows = args;
  columns.rows.begin = 0;
  columns.rows.end = rows;
  columns.sums = sums.const_data_ptr<double>();
  columns.chunks = chunks;
  columns.dweight = dweight.defined() ? dweight.data_ptr() : nullptr;
  columns.dbias = dbias.defined() ? dbias.data_ptr() : nullptr;
  columns.dweight_dtype = dweight.defined() ? cpu_dtype(dweight.scalar_type()) : args.dtype;
  columns.dbias_dtype = dbias.defined() ? cpu_dtype(dbias.scalar_type()) : args.dtype;
  cpu::norm_columns(columns);
}

}  // namespace allfinite
