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
    weight = prepared(w);
    bias = prepared(b);
  }
  static const void* pointer(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
  Tensor weight, bias;
  at::ScalarType dtype;

 private:
  // Without a call of `to` where there is nothing to do: that costs as much as a short row.
  Tensor prepared(const OptionalTensor& t) const {
    return !t ? Tensor() : t->scalar_type() == dtype ? t->contiguous() : t->to(dtype).contiguous();
  }
};

}  // namespace allfinite
