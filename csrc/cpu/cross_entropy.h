// Cross entropy over rows of logits: arguments of the CPU kernels (what they compute: cross_entropy.cpp). Torch-free.
#pragma once
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/dtype.h"

namespace allfinite::cpu {

// Per row three numbers, fp32 (fp64 for fp64): the largest logit m; log sum exp(logit - m); and, for a class index, 1
// minus its probability (the sum of the others), for class probabilities the sum of the masses.
constexpr int kCrossEntropyStats = 3;

// What forward and backward share. "compute": fp32, or fp64 for fp64 logits.
struct CrossEntropyRows {
  const void* x;            // [rows, n], dtype, rows x_stride elements apart
  const int64_t* target;    // [rows], each in [0, n) or ignore_index; null with class probabilities
  const void* probability;  // [rows, n], probability_dtype, rows probability_stride apart, or null
  const void* weight;       // [n], compute, or null: all 1
  void* stats;              // [rows, 3], compute; written by the forward
  double weight_sum;        // of all n weights
  double smoothing, z_loss;
  int64_t begin, end;  // rows to do
  int64_t n, x_stride, probability_stride, ignore_index;
  DType dtype, probability_dtype;  // the latter: dtype or compute
};

struct CrossEntropyForwardArgs {
  CrossEntropyRows rows;
  double* loss;  // [rows], before any reduction
};

struct CrossEntropyBackwardArgs {
  CrossEntropyRows rows;
  const void* grad;    // compute, of each row's loss, grad_stride (0 or 1) apart
  double denominator;  // what the sum of the losses was divided by
  void* dx;            // [rows, n], dtype, or null: not wanted
  void* dprobability;  // [rows, n], probability_dtype, or null
  int64_t grad_stride;
};

ALLFINITE_CPU_KERNEL(cross_entropy_forward, CrossEntropyForwardArgs)
ALLFINITE_CPU_KERNEL(cross_entropy_backward, CrossEntropyBackwardArgs)

}  // namespace allfinite::cpu
