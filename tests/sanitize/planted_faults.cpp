// One fault of each kind that the sanitizers are there for, compiled as kernels are. test_planted_faults.py calls them
// on torch's tensors and wants them reported; with `right` each is its twin without the fault.
#include <cstring>

#include "cpu/simd.h"

namespace {

using namespace allfinite::cpu::ALLFINITE_ISA;

using Fault = void(float* data, int64_t count, bool right);

// Calls f(i) for each whole vector, and, unless `right`, for the partial one at the end, too.
template <class F>
void for_each_vector(int64_t count, bool right, F&& f) {
  for (int64_t i = 0; i + (right ? kWidth<float> - 1 : 0) < count; i += kWidth<float>) {
    f(i);
  }
}

void read_past_the_end(float* data, int64_t count, bool right) {
  Vec<float> sum = {};
  for_each_vector(count, right, [&](int64_t i) { sum += load<float>(data + i); });
  data[0] = sum[0];
}

void write_past_the_end(float* data, int64_t count, bool right) {
  for_each_vector(count, right, [&](int64_t i) { store(data + i, Vec<float>{}); });
}

void read_before_the_start(float* data, int64_t, bool right) {
  data[0] = data[right ? 0 : -1];
}

void signed_overflow(float* data, int64_t count, bool right) {
  const int32_t near_the_end = INT32_MAX - static_cast<int32_t>(count);
  data[0] = static_cast<float>(near_the_end + static_cast<int32_t>(right ? count : count + 1));
}

void misaligned_read(float* data, int64_t, bool right) {
  const char* bytes = reinterpret_cast<const char*>(data) + (right ? 0 : 1);
  data[0] = *reinterpret_cast<const float*>(bytes);
}

void shift_too_far(float* data, int64_t, bool right) {
  data[0] = static_cast<float>(1u << (static_cast<int32_t>(data[0]) + (right ? 0 : 32)));
}

void float_beyond_integer(float* data, int64_t, bool right) {
  data[0] = static_cast<float>(static_cast<int32_t>(data[0] * (right ? 1.0f : 1e30f)));
}

constexpr struct {
  const char* name;
  Fault* fault;
} kFaults[] = {
    {"read_past_the_end", read_past_the_end},
    {"write_past_the_end", write_past_the_end},
    {"read_before_the_start", read_before_the_start},
    {"signed_overflow", signed_overflow},
    {"misaligned_read", misaligned_read},
    {"shift_too_far", shift_too_far},
    {"float_beyond_integer", float_beyond_integer},
};

}  // namespace

#if defined(ALLFINITE_ISA_IS_baseline)
#define ALLFINITE_PLANTED planted_baseline
#elif defined(ALLFINITE_ISA_IS_avx2)
#define ALLFINITE_PLANTED planted_avx2
#else
#define ALLFINITE_PLANTED planted_avx512
#endif

// Returns whether there is a fault of this name.
extern "C" __attribute__((visibility("default"))) bool ALLFINITE_PLANTED(const char* name, float* data, int64_t count,
                                                                         bool right) {
  for (const auto& planted : kFaults) {
    if (std::strcmp(planted.name, name) == 0) {
      planted.fault(data, count, right);
      return true;
    }
  }
  return false;
}
