// Launchers of LayerNorm: from the run-time dtypes and alignments of the arguments to one kernel instance.
#include "cuda/layer_norm.h"

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/layer_norm_backward.cuh"

namespace allfinite::cuda {
namespace {

template <class T>
struct Type {
  using type = T;
};

// f(Type<X>, Type<W>): activations X with parameters W, of the same type or fp32.
template <class F>
cudaError_t visit_types(DType dtype, DType weight_dtype, F f) {
  const bool wide = weight_dtype == DType::kFloat32;
  switch (dtype) {
    case DType::kFloat16:
      return wide ? f(Type<__half>(), Type<float>()) : f(Type<__half>(), Type<__half>());
    case DType::kBFloat16:
      return wide ? f(Type<__nv_bfloat16>(), Type<float>()) : f(Type<__nv_bfloat16>(), Type<__nv_bfloat16>());
    case DType::kFloat32:
      return f(Type<float>(), Type<float>());
  }
  return cudaErrorInvalidValue;
}

// Whether rows of n elements of X, and the parameters beside them, can be read 16 bytes at a time. Null is
// aligned.
template <class X, class... Pointers>
bool vectorizable(int64_t n, Pointers... pointers) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return n % Pack<X>::kSize == 0 && (aligned(pointers) && ...);
}

// One thread for each 16 bytes of a row, in whole warps.
template <class X>
dim3 row_block(int64_t n) {
  const int64_t warps = divide_up(divide_up(n, Pack<X>::kSize), kWarp);
  return dim3(static_cast<unsigned>(warps * kWarp < kRowThreads ? warps * kWarp : kRowThreads));
}

dim3 row_grid(int64_t rows) {
  constexpr int64_t kMaxGrid = INT32_MAX;
  return dim3(static_cast<unsigned>(rows < kMaxGrid ? rows : kMaxGrid));
}

template <class X, class W>
cudaError_t input_gradient(const LayerNormBackwardParams& p, cudaStream_t stream) {
  const auto kernel = vectorizable<X>(p.n, p.dy, p.x, p.weight, p.dx) ? layer_norm_input_gradient_kernel<true, X, W>
                                                                      : layer_norm_input_gradient_kernel<false, X, W>;
  return launch(kernel, row_grid(p.rows), row_block<X>(p.n), stream, p);
}

template <class X>
cudaError_t column_gradients(const LayerNormBackwardParams& p, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>(divide_up(p.n, kTileColumns));
  const dim3 block(kTileColumns, kTileRows);
  if (p.rows > 0) {
    const dim3 grid(tiles, static_cast<unsigned>(chunk_count(p.rows)));
    if (const cudaError_t error = launch(layer_norm_columns_kernel<X>, grid, block, stream, p); error != cudaSuccess) {
      return error;
    }
  }
  return launch(layer_norm_finish_columns_kernel<X>, dim3(tiles), block, stream, p);
}

}  // namespace

int64_t layer_norm_backward_workspace(int64_t rows, int64_t n) {
  return chunk_count(rows) * kColumnSums * n;
}

cudaError_t layer_norm_forward(const LayerNormForwardParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.n == 0) {
    return cudaSuccess;
  }
  return visit_types(params.dtype, params.weight_dtype, [&](auto x, auto w) {
    using X = typename decltype(x)::type;
    using W = typename decltype(w)::type;
    const auto kernel = vectorizable<X>(params.n, params.x, params.weight, params.bias, params.y)
                            ? layer_norm_forward_kernel<true, X, W>
                            : layer_norm_forward_kernel<false, X, W>;
    return launch(kernel, row_grid(params.rows), row_block<X>(params.n), stream, params);
  });
}

cudaError_t layer_norm_backward(const LayerNormBackwardParams& params, cudaStream_t stream) {
  if (params.n == 0) {
    return cudaSuccess;
  }
  return visit_types(params.dtype, params.weight_dtype, [&](auto x, auto w) {
    using X = typename decltype(x)::type;
    cudaError_t error = cudaSuccess;
    if (params.dx && params.rows > 0) {
      error = input_gradient<X, typename decltype(w)::type>(params, stream);
    }
    if (error == cudaSuccess && (params.dweight || params.dbias)) {
      error = column_gradients<X>(params, stream);
    }
    return error;
  });
}

}  // namespace allfinite::cuda
