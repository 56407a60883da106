// What the CPU glue of every norm does with its tensors: made contiguous, handed to the kernels by norm_cpu.h.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/op.h"

namespace allfinite {

// One call of a norm. The outputs are allocated by the op's meta function. What is absent stays as it is here.
struct NormForward {
  Tensor input;
  Tensor residual = {};
  OptionalTensor weight = {}, bias = {};
  double eps = 0;
  bool rms = false;
  Tensor output;    // written, as the next two
  Tensor sum = {};  // with a residual
  Tensor stats;
};
void norm_forward_cpu(const NormForward& norm);

// One call of its backward. Gradients that are not wanted are undefined.
struct NormBackward {
  Tensor grad;
  Tensor grad_sum = {};  // of the stored sum
  Tensor x;              // what was normalized: the input, or the stored sum
  OptionalTensor weight = {};
  Tensor stats;
  bool rms = false;
  Tensor dx = {};         // written, as the next three; in grad's dtype
  Tensor dresidual = {};  // in x's dtype, where that is not grad's: the same gradient
  Tensor dweight = {}, dbias = {};
};
void norm_backward_cpu(const NormBackward& norm);

}  // namespace allfinite
