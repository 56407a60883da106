// The inner ops of scaled_dot_product_attention, as the files of this folder share them.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "ops/op.h"

namespace allfinite::attention {

constexpr char kOp[] = "allfinite::scaled_dot_product_attention";

// What both inner ops take beside tensors; left and right: -1 is unbounded, is_causal is right = 0.
struct Options {
  double dropout_p = 0;
  std::optional<double> scale;
  double softcap = 0;
  int64_t left = -1, right = -1;
};

using Forward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                   const OptionalTensor&, double, std::optional<double>, double,
                                                   int64_t, int64_t);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                                            const Tensor&, const Tensor&, const OptionalTensor&,
                                                            const OptionalTensor&, const Tensor&, double,
                                                            std::optional<double>, double, int64_t, int64_t,
                                                            std::array<bool, 4>);

// Through the dispatcher: output, lse, stats.
std::tuple<Tensor, Tensor, Tensor> call_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                const OptionalTensor& mask, const OptionalTensor& seed,
                                                const Options& options);

// The dtype that scores are computed in, and that the row statistics have.
inline at::ScalarType compute_dtype(const Tensor& query, const OptionalTensor& mask) {
  const bool wide = query.scalar_type() == at::kDouble || (mask && mask->scalar_type() == at::kDouble);
  return wide ? at::kDouble : at::kFloat;
}
inline at::ScalarType lse_dtype(const Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace allfinite::attention
