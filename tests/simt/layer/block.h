// The running block: its threads, warps, barrier and shared memory. Shared by scheduler.cpp and
// collectives.cpp.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "layer/fiber.h"

namespace allfinite::simt {

constexpr unsigned kWarpLanes = 32;

// A warp operation in progress. Slots and happens-before addresses are double: a lane may enter the next
// operation while another still reads the results of this one.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0;
  unsigned generation = 0;
  WarpOp op{};
  Site site{};
  char order[2];
  alignas(16) Slot slots[2][kWarpLanes];
};

struct Warp {
  uint32_t runnable = 0, live = 0;
  std::vector<std::unique_ptr<Rendezvous>> in_flight;  // one for each mask seen
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
  int satisfied[2] = {0, 0};  // threads whose predicate counts
  int result[2] = {0, 0};
  Site site{};
  std::vector<unsigned> waiters;
  char order[2];
};

struct SharedVariable {
  const void* key;
  void* memory;
};

struct Block {
  std::vector<Fiber> fibers;  // kept from block to block, for their stacks
  std::vector<Warp> warps;
  std::unique_ptr<Barrier> barrier;  // new for each block, as what ThreadSanitizer knows of it must not live on
  std::vector<SharedVariable> shared;
  unsigned live = 0;
  Fiber main;
  Fiber* running = nullptr;
  const std::function<void()>* body = nullptr;
  std::string error;
  uint32_t random_state = 1;
};

extern thread_local Block the_block;

// scheduler.cpp
void make_runnable(unsigned thread);
void wait_in(const char* what, Site site);
[[noreturn]] void abandon(const std::string& what);
std::string describe(const Fiber& fiber);
std::string describe(Site site);
unsigned index_of(const Fiber& fiber);

// collectives.cpp: a thread has arrived or returned; go on if nobody else is waited for.
void complete_if_full(Rendezvous& rendezvous, Warp& warp, unsigned warp_index);
void complete_if_full(Barrier& barrier);
void free_shared_memory();

}  // namespace allfinite::simt
