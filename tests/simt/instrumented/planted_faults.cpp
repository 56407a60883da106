// Kernels with one fault each that only a sanitizer sees. `simt_planted NAME` runs one, and CTest expects the
// report; `simt_planted NAME right` runs the twin without the fault, which must pass.
#include <cstdio>
#include <map>
#include <string>

#include "cuda/common/launch.cuh"
#include "guarded_buffer.h"

namespace allfinite::simt {
namespace {

using Kernel = void (*)(const float* in, float* out, bool right);
constexpr unsigned kThreads = 64;

__global__ void read_past_the_end(const float* in, float* out, bool right) {
  out[threadIdx.x] = in[threadIdx.x + (right ? 0 : 1)];
}

__global__ void write_past_shared_memory(const float* in, float* out, bool right) {
  ALLFINITE_SHARED(float, scratch, [kThreads]);
  float* first = scratch;
  first[threadIdx.x + (right ? 0 : 1)] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = first[threadIdx.x];
}

// Right numbers in most orders, and a race all the same: the scratch is written again before everybody has
// read it.
__global__ void reuse_without_barrier(const float* in, float* out, bool right) {
  ALLFINITE_SHARED(float, scratch, [2]);
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x % 32 == 0) {
      scratch[threadIdx.x / 32] = in[threadIdx.x];
    }
    __syncthreads();
    sum += scratch[0] + scratch[1];
    if (right) {
      __syncthreads();
    }
  }
  out[threadIdx.x] = sum;
}

// A shuffle makes the warp meet, but orders no memory.
__global__ void shuffle_instead_of_syncwarp(const float* in, float* out, bool right) {
  ALLFINITE_SHARED(float, scratch, [kThreads]);
  scratch[threadIdx.x] = in[threadIdx.x];
  if (right) {
    __syncwarp();
  } else {
    __shfl_sync(0xffffffffu, 0, 0);
  }
  out[threadIdx.x] = scratch[threadIdx.x ^ 1];
}

__global__ void blocks_write_one_word(const float* in, float* out, bool right) {
  if (threadIdx.x == 0) {
    out[right ? blockIdx.x : 0] = in[blockIdx.x];
  }
}

}  // namespace
}  // namespace allfinite::simt

int main(int argc, char** argv) {
  using namespace allfinite;
  struct Planted {
    simt::Kernel kernel;
    unsigned blocks;
  };
  const std::map<std::string, Planted> all = {
      {"read_past_the_end", {simt::read_past_the_end, 1}},
      {"write_past_shared_memory", {simt::write_past_shared_memory, 1}},
      {"reuse_without_barrier", {simt::reuse_without_barrier, 1}},
      {"shuffle_instead_of_syncwarp", {simt::shuffle_instead_of_syncwarp, 1}},
      {"blocks_write_one_word", {simt::blocks_write_one_word, 2}},
  };
  const auto found = argc > 1 ? all.find(argv[1]) : all.end();
  if (found == all.end()) {
    std::fprintf(stderr, "expected the name of a planted fault\n");
    return 2;
  }
  const auto [kernel, blocks] = found->second;
  simt::GuardedBuffer<float> in(std::vector<float>(simt::kThreads, 1.0f), 0), out(simt::kThreads);
  cuda::launch(kernel, dim3(blocks), dim3(simt::kThreads), nullptr, in.data(), out.data(), argc > 2);
  std::puts("ran to the end");
  return 0;
}
