// Weight and bias of a norm as its kernels take them.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/op.h"

namespace allfinite {

// Both in one dtype, contiguous: where they differ, the wider.
struct Affine {
  Affine(const Tensor& input, const OptionalTensor& w, const OptionalTensor& b) {
    dtype = input.scalar_type();
    if ((w && w->scalar_type() != dtype) || (b && b->scalar_type() != dtype)) {
      dtype = at::kFloat;
    }
    weight = w ? w->to(dtype).contiguous() : Tensor();
    bias = b ? b->to(dtype).contiguous() : Tensor();
  }
  static const void* pointer(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
  Tensor weight, bias;
  at::ScalarType dtype;
};

}  // namespace allfinite
