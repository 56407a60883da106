// From the run-time dtypes of an argument struct to the types of a kernel template.
#pragma once
#include "cpu/dtype.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class T>
struct Tag {
  using type = T;
};

// What a kernel accumulates in: double for double, else float.
template <class T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateType<T>::type;

// f(Tag<T>): T is the storage type.
template <class F>
void visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Tag<Half>{});
    case DType::kBFloat16:
      return f(Tag<BFloat16>{});
    case DType::kFloat32:
      return f(Tag<float>{});
    case DType::kFloat64:
      return f(Tag<double>{});
  }
}

// f(Tag<T>, Tag<W>): activations T with parameters W, which are of the same type, or fp32 beside 16-bit
// activations.
template <class F>
void visit_with_weight(DType dtype, DType weight_dtype, F&& f) {
  visit_dtype(dtype, [&](auto t) {
    if (weight_dtype == DType::kFloat32) {
      f(t, Tag<Accumulate<typename decltype(t)::type>>{});
    } else {
      f(t, t);
    }
  });
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
