// The layer itself: the faults that it must report are planted here, each beside its right twin. What only a
// sanitizer sees is in planted_faults.cpp.
#include "catch.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vector.cuh"
#include "guarded_buffer.h"

namespace allfinite::simt {
namespace {

// in and out hold one float for each thread; `right` selects the twin without the fault.
using Kernel = void (*)(const float* in, float* out, bool right);

std::vector<float> run(Kernel kernel, unsigned threads, bool right) {
  std::vector<float> values(threads + 4);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i);
  }
  GuardedBuffer<float> in(values, 0), out(threads);
  cuda::launch(kernel, dim3(1), dim3(threads), nullptr, in.data(), out.data(), right);
  return out.values();
}

std::string error_of(Kernel kernel, unsigned threads) {
  try {
    run(kernel, threads, false);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

__global__ void barrier_in_divergent_code(const float* in, float* out, bool right) {
  if (right || threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void barrier_that_some_miss(const float* in, float* out, bool right) {
  if (right || threadIdx.x != 5) {
    __syncthreads();
  }
  __syncwarp();
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void shuffle_with_absent_lanes(const float* in, float* out, bool right) {
  float value = in[threadIdx.x];
  if (threadIdx.x < 16) {
    value += __shfl_xor_sync(right ? 0xffffu : 0xffffffffu, value, 1);
  } else if (!right) {
    __syncthreads();
  }
  out[threadIdx.x] = value;
}

__global__ void misaligned_vector(const float* in, float* out, bool right) {
  out[threadIdx.x] = load_vector<cuda::Pack<float>>(in + (right ? 0 : 1)).values[0];
}

__global__ void unset_shared_memory(const float* in, float* out, bool right) {
  ALLFINITE_SHARED(float, scratch, [64]);
  if (right || threadIdx.x != 3) {
    scratch[threadIdx.x] = in[threadIdx.x];
  }
  __syncthreads();
  out[threadIdx.x] = scratch[threadIdx.x];
}

__global__ void early_return(const float* in, float* out, bool) {
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x % 2 == 1) {
    return;
  }
  out[threadIdx.x] = static_cast<float>(__syncthreads_count(threadIdx.x < 8));
}

__global__ void block_and_warp_votes(const float* in, float* out, bool) {
  const bool all = __syncthreads_and(in[threadIdx.x] >= 0), any = __syncthreads_or(in[threadIdx.x] == 40.0f);
  const unsigned ballot = __ballot_sync(0xffffffffu, threadIdx.x % 2);
  out[threadIdx.x] = all && any && ballot == 0xaaaaaaaau ? __shfl_down_sync(0xffffffffu, in[threadIdx.x], 1) : -1.0f;
}

bool any_nan(const std::vector<float>& values) {
  return std::any_of(values.begin(), values.end(), [](float v) { return std::isnan(v); });
}

TEST_CASE("a barrier in divergent code is reported with both lines", "[races]") {
  CHECK(contains(error_of(barrier_in_divergent_code, 32), "while others are in the one at test_layer.cpp"));
  CHECK_NOTHROW(run(barrier_in_divergent_code, 32, true));
}

TEST_CASE("a barrier that one thread misses is reported as a deadlock", "[races]") {
  const std::string error = error_of(barrier_that_some_miss, 64);
  CHECK(contains(error, "deadlock"));
  CHECK(contains(error, "waits in __syncthreads at test_layer.cpp"));
  CHECK_NOTHROW(run(barrier_that_some_miss, 64, true));
}

TEST_CASE("a shuffle whose mask names lanes that never come is reported", "[races]") {
  CHECK(contains(error_of(shuffle_with_absent_lanes, 32), "waits in a shuffle"));
  CHECK(run(shuffle_with_absent_lanes, 32, true)[2] == 5.0f);
}

TEST_CASE("a misaligned 16-byte access is reported", "[races]") {
  CHECK(contains(error_of(misaligned_vector, 1), "misaligned vector load"));
  CHECK_NOTHROW(run(misaligned_vector, 1, true));
}

TEST_CASE("shared memory that was never written reads as NaN", "[races]") {
  CHECK(any_nan(run(unset_shared_memory, 64, false)));
  CHECK_FALSE(any_nan(run(unset_shared_memory, 64, true)));
}

#if !defined(__SANITIZE_THREAD__)  // there it is a data race, which would rightly end the test
__global__ void barrier_missing_before_read(const float* in, float* out, bool right) {
  ALLFINITE_SHARED(float, scratch, [64]);
  scratch[threadIdx.x] = in[threadIdx.x];
  if (right) {
    __syncthreads();
  }
  out[threadIdx.x] = scratch[63 - threadIdx.x];
}

TEST_CASE("a missing barrier shows as NaN", "[races]") {
  CHECK(any_nan(run(barrier_missing_before_read, 64, false)));
  CHECK_FALSE(any_nan(run(barrier_missing_before_read, 64, true)));
}
#endif

TEST_CASE("threads that returned are not waited for", "[races]") {
  const auto out = run(early_return, 64, true);
  CHECK(out[2] == 4.0f);
  CHECK(out[3] == 3.0f);
}

TEST_CASE("votes and shuffles give what CUDA documents", "[races]") {
  const auto out = run(block_and_warp_votes, 64, true);
  CHECK(out[0] == 1.0f);
  CHECK(out[31] == 31.0f);  // the last lane has no neighbour: its own value
}

TEST_CASE("a launch goes on after one that failed", "[races]") {
  CHECK_THROWS_AS(run(barrier_that_some_miss, 64, false), Error);
  CHECK(run(early_return, 64, true)[2] == 4.0f);
}

TEST_CASE("a launch that no device takes is refused", "[races]") {
  CHECK_THROWS_AS(run(early_return, 1025, true), Error);
}

}  // namespace
}  // namespace allfinite::simt
