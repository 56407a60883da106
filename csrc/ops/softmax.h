// The outputs of softmax's inner ops, which the meta and the CPU kernels allocate alike.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "ops/op.h"

namespace allfinite::softmax_rows {

inline Tensor output_like(const Tensor& t) {
  return at::empty_symint(t.sym_sizes(), t.options());
}

inline bool is_narrow(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// The output, and what backward needs beside it: two numbers a row where the output is rounded to 16 bits.
inline std::tuple<Tensor, Tensor> outputs_like(const Tensor& input, int64_t dim, bool keep_numbers) {
  const auto options = input.options().dtype(at::kDouble);
  if (!keep_numbers || !is_narrow(input)) {
    return {output_like(input), at::empty({0}, options)};
  }
  auto sizes = input.sym_sizes().vec();
  sizes.erase(sizes.begin() + dim);
  sizes.push_back(2);
  return {output_like(input), at::empty_symint(sizes, options)};
}

inline std::tuple<Tensor, Tensor> gradients_like(const Tensor& input, const OptionalTensor& mask,
                                                 std::array<bool, 2> output_mask) {
  return {output_mask[0] ? output_like(input) : Tensor(), output_mask[1] && mask ? output_like(*mask) : Tensor()};
}

}  // namespace allfinite::softmax_rows
