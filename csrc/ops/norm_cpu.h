// Runs the norm kernels of csrc/cpu over all rows, in parallel: what the CPU glue of every norm op ends in.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cpu/norm.h"

namespace allfinite {

// Fills in rows, begin, end and scratch. rows > 0, n > 0.
void run_norm_forward(const cpu::NormForwardArgs& args, int64_t rows);

// Fills in rows, begin, end, scratch and sums; writes dx and dresidual where args name them, and the column sums to
// dweight and dbias ([n] elements each, contiguous) where those are defined. rows > 0, n > 0.
void run_norm_backward(const cpu::NormBackwardArgs& args, int64_t rows, const at::Tensor& dweight,
                       const at::Tensor& dbias);

}  // namespace allfinite
