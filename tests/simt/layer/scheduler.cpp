// Runs the blocks of a grid one after another, and the threads of a block in the order that config() asks
// for.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "layer/block.h"

namespace allfinite::simt {

thread_local Block the_block;
thread_local ThreadInfo* current = nullptr;

namespace {

thread_local Config the_config;
char end_of_launch;  // what a thread did is visible after the launch: ThreadSanitizer learns it here

void switch_to(Fiber& to, bool for_good = false) {
  Fiber& from = *the_block.running;
  the_block.running = &to;
  switch_fiber(from, to, for_good);
}

int pick_random() {
  unsigned candidates = 0;
  for (const Warp& warp : the_block.warps) {
    candidates += static_cast<unsigned>(__builtin_popcount(warp.runnable));
  }
  if (candidates == 0) {
    return -1;
  }
  the_block.random_state = the_block.random_state * 1664525u + 1013904223u;
  unsigned skip = (the_block.random_state >> 8) % candidates;
  for (unsigned w = 0;; ++w) {
    for (uint32_t lanes = the_block.warps[w].runnable; lanes != 0; lanes &= lanes - 1) {
      if (skip-- == 0) {
        return static_cast<int>(w * kWarpLanes) + __builtin_ctz(lanes);
      }
    }
  }
}

// The next thread that can run, or -1. Forward and reverse try the running warp first, so that its operations
// complete with few switches.
int pick_next() {
  if (the_config.order == Order::kRandom) {
    return pick_random();
  }
  const bool reverse = the_config.order == Order::kReverse;
  const auto count = static_cast<unsigned>(the_block.warps.size());
  const unsigned start = the_block.running == &the_block.main ? 0 : the_block.running->info.warp;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned w = reverse ? (start + count - i) % count : (start + i) % count;
    if (const uint32_t lanes = the_block.warps[w].runnable; lanes != 0) {
      return static_cast<int>(w * kWarpLanes) + (reverse ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes));
    }
  }
  return -1;
}

[[noreturn]] void report_deadlock() {
  constexpr int kShown = 4;
  std::string what = "deadlock: no thread can go on";
  int waiting = 0;
  for (const Fiber& fiber : the_block.fibers) {
    if (fiber.state == FiberState::kWaiting && ++waiting <= kShown) {
      what += "\n  " + describe(fiber) + " waits in " + fiber.waits_for + " at " + describe(fiber.site);
    }
  }
  if (waiting > kShown) {
    what += "\n  and " + std::to_string(waiting - kShown) + " more";
  }
  abandon(what);
}

// A thread that has returned is no longer waited for, by the block's barrier or by its warp.
void leave_block(Fiber& fiber) {
  const unsigned thread = index_of(fiber);
  Warp& warp = the_block.warps[thread / kWarpLanes];
  fiber.state = FiberState::kDone;
  warp.runnable &= ~(1u << thread % kWarpLanes);
  warp.live &= ~(1u << thread % kWarpLanes);
  --the_block.live;
  for (auto& rendezvous : warp.in_flight) {
    complete_if_full(*rendezvous, warp, thread / kWarpLanes);
  }
  complete_if_full(*the_block.barrier);
}

void fiber_main() {
  entered_fiber();
  (*the_block.body)();
  happens_before(end_of_launch);
  leave_block(*the_block.running);
  const int next = pick_next();
  if (next < 0 && the_block.live != 0) {
    report_deadlock();
  }
  switch_to(next < 0 ? the_block.main : the_block.fibers[static_cast<unsigned>(next)], true);
  std::abort();
}

void prepare_block(uint3 index, dim3 grid, dim3 dim) {
  const unsigned threads = dim.x * dim.y * dim.z;
  the_block.live = threads;
  if (the_block.fibers.size() < threads) {
    the_block.fibers.resize(threads);
  }
  the_block.warps.clear();
  the_block.warps.resize((threads + kWarpLanes - 1) / kWarpLanes);
  the_block.barrier = std::make_unique<Barrier>();
  the_block.error.clear();
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = the_block.fibers[i];
    prepare_fiber(fiber, fiber_main);
    fiber.info = {
        {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)}, index, dim, grid, i % kWarpLanes, i / kWarpLanes};
    the_block.warps[i / kWarpLanes].live |= 1u << i % kWarpLanes;
    make_runnable(i);
  }
}

void run_block(uint3 index, dim3 grid, dim3 dim) {
  constexpr size_t kTsanHistory = 1024;
  prepare_block(index, grid, dim);
  switch_to(the_block.fibers[static_cast<unsigned>(pick_next())]);
  for (unsigned i = 0; i < dim.x * dim.y * dim.z; ++i) {
    the_block.fibers[i].state = FiberState::kDone;  // also of threads that an error left waiting
    retire_fiber(the_block.fibers[i]);
  }
  destroy_retired_fibers(kTsanHistory);
  free_shared_memory();
  if (!the_block.error.empty()) {
    happens_after(end_of_launch);
    throw Error(the_block.error);
  }
}

}  // namespace

Config& config() {
  return the_config;
}

unsigned index_of(const Fiber& fiber) {
  return static_cast<unsigned>(&fiber - the_block.fibers.data());
}

std::string describe(const Fiber& fiber) {
  char text[128];
  const uint3 t = fiber.info.thread, b = fiber.info.block;
  std::snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", t.x, t.y, t.z, b.x, b.y, b.z);
  return text;
}

std::string describe(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

void make_runnable(unsigned thread) {
  the_block.fibers[thread].state = FiberState::kRunnable;
  the_block.warps[thread / kWarpLanes].runnable |= 1u << thread % kWarpLanes;
}

void wait_in(const char* what, Site site) {
  Fiber& fiber = *the_block.running;
  const unsigned thread = index_of(fiber);
  happens_before(end_of_launch);  // should it be the last thing that this thread does
  fiber.state = FiberState::kWaiting;
  fiber.waits_for = what;
  fiber.site = site;
  the_block.warps[thread / kWarpLanes].runnable &= ~(1u << thread % kWarpLanes);
  const int next = pick_next();
  if (next < 0) {
    report_deadlock();
  }
  switch_to(the_block.fibers[static_cast<unsigned>(next)]);
}

// Back to run_block, which throws on its own stack.
void abandon(const std::string& what) {
  the_block.error = what;
  happens_before(end_of_launch);
  switch_to(the_block.main);
  std::abort();
}

void fail(const std::string& what) {
  abandon(describe(*the_block.running) + ": " + what);
}

void run_grid(dim3 grid, dim3 block, const std::function<void()>& thread_body) {
  constexpr unsigned kMaxBlockThreads = 1024, kMaxGridYZ = 65535;
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > kMaxGridYZ ||
      grid.z > kMaxGridYZ) {
    throw Error("bad launch: no device takes this grid or block");
  }
  the_block.running = &the_block.main;
  the_block.body = &thread_body;
  the_block.random_state = the_config.seed;
  adopt_current_stack(the_block.main);
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        run_block({x, y, z}, grid, block);
      }
    }
  }
  destroy_retired_fibers(0);
  happens_after(end_of_launch);
}

}  // namespace allfinite::simt
