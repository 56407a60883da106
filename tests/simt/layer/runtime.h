// The SIMT layer: runs a CUDA kernel, compiled as plain C++, on the CPU with one fiber for each CUDA thread.
//
// This header is what tests and CUDA's names (cuda_names.h) need of it. What it reports, as a thrown Error
// with the thread and the source line: barriers in divergent code, barriers that some threads never reach,
// warp operations with a wrong mask, misaligned vector accesses. What it makes visible: shared memory that
// was never written (NaN), and, with a sanitizer, accesses out of bounds and races.
#pragma once
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace allfinite::simt {

// Which of the threads that can run goes next. A right kernel gives the same results in every order.
enum class Order { kForward, kReverse, kRandom };

struct Config {
  Order order = Order::kForward;
  uint32_t seed = 1;  // of Order::kRandom
};
Config& config();

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs thread_body once for each thread of the grid, block after block. Throws Error.
void run_grid(dim3 grid, dim3 block, const std::function<void()>& thread_body);

// What the running thread is; set on every switch.
struct ThreadInfo {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  unsigned lane, warp;
};
extern thread_local ThreadInfo* current;

// Ends the launch with an Error that names the running thread.
[[noreturn]] void fail(const std::string& what);

// The source line of a synchronising call, taken by default arguments of the functions in cuda_names.h.
struct Site {
  const char* file;
  int line;
};

// What __syncthreads_count, _and and _or make of the threads' predicates.
enum class Reduction { kCount, kAnd, kOr };
int block_barrier(int predicate, Reduction reduction, Site site);

enum class WarpOp { kSyncwarp, kShuffle, kVote };
using Slot = unsigned char[16];
// Every live lane of `mask` deposits `size` bytes and waits for the others. Returns the 32 slots, to be read
// with read_slot until this lane's next warp operation.
Slot* warp_rendezvous(uint32_t mask, WarpOp op, const void* in, size_t size, Site site);
void read_slot(void* out, Slot* slots, unsigned lane, size_t size);
uint32_t live_lanes();

// Memory of the running block, of its own for each `key`; filled with 0xFF, which is a NaN in fp16, bf16,
// fp32, fp64.
void* shared_memory(const void* key, size_t bytes, size_t alignment);
void memory_fence();

template <class T>
T& shared_variable(const void* key) {
  return *static_cast<T*>(shared_memory(key, sizeof(T), alignof(T)));
}

// A device faults on a misaligned vector access; a CPU does not.
template <class V>
V load_vector(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(V) != 0) {
    fail("misaligned vector load");
  }
  return *static_cast<const V*>(address);
}

template <class V>
void store_vector(void* address, const V& value) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(V) != 0) {
    fail("misaligned vector store");
  }
  *static_cast<V*>(address) = value;
}

template <class T>
T shuffle(uint32_t mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "shuffles move 4 or 8 bytes");
  Slot* slots = warp_rendezvous(mask, WarpOp::kShuffle, &value, sizeof(T), site);
  if ((mask >> source & 1) == 0) {
    fail("a shuffle reads lane " + std::to_string(source) + ", which is not in its mask");
  }
  T result;
  read_slot(&result, slots, static_cast<unsigned>(source), sizeof(T));
  return result;
}

}  // namespace allfinite::simt
