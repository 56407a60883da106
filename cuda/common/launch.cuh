// Starts a kernel and reports whether the launch was accepted; never throws under nvcc.
// On the host (ALLFINITE_SIMT_HOST) the kernel has run when launch returns, and a fault in it is a
// simt::Error.
#pragma once
#include <driver_types.h>

#include "cuda/common/simt.cuh"
#if defined(__CUDACC__)
#include <cuda_runtime_api.h>
#else
#include <tuple>
#include <type_traits>
#endif

namespace allfinite::cuda {

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, [[maybe_unused]] cudaStream_t stream,
                   const Args&... args) {
#if defined(__CUDACC__)
  kernel<<<grid, block, 0, stream>>>(static_cast<Params>(args)...);
  return cudaGetLastError();
#else
  const std::tuple<std::decay_t<Params>...> params(args...);
  simt::run_grid(grid, block, [&] { std::apply(kernel, params); });
  return cudaSuccess;
#endif
}

}  // namespace allfinite::cuda
