// The combinations of activations X and parameters W that the kernels take, for TEMPLATE_TEST_CASE.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace allfinite::simt {

template <class X_, class W_>
struct Types {
  using X = X_;
  using W = W_;
};
using Half = Types<__half, __half>;
using HalfFloat = Types<__half, float>;
using BFloat = Types<__nv_bfloat16, __nv_bfloat16>;
using BFloatFloat = Types<__nv_bfloat16, float>;
using Float = Types<float, float>;

#define ALL_TYPES Half, HalfFloat, BFloat, BFloatFloat, Float

}  // namespace allfinite::simt
