// The rule for normalized_shape that the norm modules share.
#pragma once
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace allfinite::nn {

inline void check_normalized_shape(const char* op, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(!shape.empty() && std::all_of(shape.begin(), shape.end(), [](int64_t n) { return n >= 0; }), op,
                    ": expected normalized_shape of at least one dimension and no negative size, but got ", shape);
}

}  // namespace allfinite::nn
