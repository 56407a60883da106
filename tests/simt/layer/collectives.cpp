// What threads do together: block barriers, warp operations, shared memory, fences.
#include <cstdlib>
#include <cstring>

#include "layer/block.h"

namespace allfinite::simt {
namespace {

[[maybe_unused]] char fence_order;

bool same_line(Site a, Site b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

const char* name_of(WarpOp op) {
  return op == WarpOp::kSyncwarp ? "__syncwarp" : op == WarpOp::kShuffle ? "a shuffle" : "a vote";
}

Rendezvous& rendezvous_of(Warp& warp, uint32_t mask) {
  for (auto& rendezvous : warp.in_flight) {
    if (rendezvous->mask == mask) {
      return *rendezvous;
    }
  }
  Unwatched unwatched;
  warp.in_flight.push_back(std::make_unique<Rendezvous>());
  warp.in_flight.back()->mask = mask;
  return *warp.in_flight.back();
}

}  // namespace

void complete_if_full(Rendezvous& rendezvous, Warp& warp, unsigned warp_index) {
  if (rendezvous.arrived == 0 || (rendezvous.arrived & warp.live) != (rendezvous.mask & warp.live)) {
    return;
  }
  for (uint32_t lanes = rendezvous.arrived; lanes != 0; lanes &= lanes - 1) {
    make_runnable(warp_index * kWarpLanes + static_cast<unsigned>(__builtin_ctz(lanes)));
  }
  rendezvous.arrived = 0;
  ++rendezvous.generation;
}

void complete_if_full(Barrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived < the_block.live) {
    return;
  }
  barrier.result[barrier.generation & 1] = barrier.satisfied[barrier.generation & 1];
  for (const unsigned thread : barrier.waiters) {
    make_runnable(thread);
  }
  barrier.waiters.clear();
  barrier.arrived = 0;
  ++barrier.generation;
  barrier.satisfied[barrier.generation & 1] = 0;
}

Slot* warp_rendezvous(uint32_t mask, WarpOp op, const void* in, size_t size, Site site) {
  Fiber& fiber = *the_block.running;
  Warp& warp = the_block.warps[fiber.info.warp];
  const uint32_t own = 1u << fiber.info.lane;
  if ((mask & own) == 0) {
    fail(std::string("calls ") + name_of(op) + " at " + describe(site) + " with a mask that leaves itself out");
  }
  Rendezvous& rendezvous = rendezvous_of(warp, mask);
  if (rendezvous.arrived == 0) {
    rendezvous.op = op;
    rendezvous.site = site;
  } else if (rendezvous.op != op || !same_line(rendezvous.site, site)) {
    fail(std::string("is in ") + name_of(op) + " at " + describe(site) + " while its warp is in " +
         name_of(rendezvous.op) + " at " + describe(rendezvous.site));
  }
  const unsigned generation = rendezvous.generation, parity = generation & 1;
  copy_unwatched(rendezvous.slots[parity][fiber.info.lane], in, size);
  if (op == WarpOp::kSyncwarp) {  // the others order no memory
    happens_before(rendezvous.order[parity]);
  }
  rendezvous.arrived |= own;
  complete_if_full(rendezvous, warp, fiber.info.warp);
  if (rendezvous.generation == generation) {
    wait_in(name_of(op), site);
  }
  if (op == WarpOp::kSyncwarp) {
    happens_after(rendezvous.order[parity]);
  }
  return rendezvous.slots[parity];
}

void read_slot(void* out, Slot* slots, unsigned lane, size_t size) {
  copy_unwatched(out, slots[lane], size);
}

uint32_t live_lanes() {
  return the_block.warps[the_block.running->info.warp].live;
}

int block_barrier(int predicate, Reduction reduction, Site site) {
  Barrier& barrier = *the_block.barrier;
  if (barrier.arrived == 0) {
    barrier.site = site;
  } else if (!same_line(barrier.site, site)) {
    fail("is in __syncthreads at " + describe(site) + " while others are in the one at " + describe(barrier.site));
  }
  const unsigned generation = barrier.generation, parity = generation & 1;
  // For kAnd the threads that say no are counted.
  barrier.satisfied[parity] += reduction == Reduction::kAnd ? predicate == 0 : predicate != 0;
  happens_before(barrier.order[parity]);
  ++barrier.arrived;
  {
    Unwatched unwatched;
    barrier.waiters.push_back(index_of(*the_block.running));
  }
  complete_if_full(barrier);
  if (barrier.generation == generation) {
    wait_in("__syncthreads", site);
  }
  happens_after(barrier.order[parity]);
  const int count = barrier.result[parity];
  return reduction == Reduction::kCount ? count : reduction == Reduction::kAnd ? count == 0 : count != 0;
}

void* shared_memory(const void* key, size_t bytes, size_t alignment) {
  for (const SharedVariable& variable : the_block.shared) {
    if (variable.key == key) {
      return variable.memory;
    }
  }
  Unwatched unwatched;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment < 16 ? 16 : alignment, bytes) != 0) {
    fail("no memory for shared memory");
  }
  std::memset(memory, 0xFF, bytes);
  the_block.shared.push_back({key, memory});
  return memory;
}

void free_shared_memory() {
  Unwatched unwatched;
  for (const SharedVariable& variable : the_block.shared) {
    std::free(variable.memory);
  }
  the_block.shared.clear();
}

void memory_fence() {
  happens_before(fence_order);
  happens_after(fence_order);
}

}  // namespace allfinite::simt
