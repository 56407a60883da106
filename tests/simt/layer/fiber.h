// A CUDA thread as a fiber: a stack of its own, and a switch that takes a few nanoseconds. Inside the layer
// only.
#pragma once
#include "layer/runtime.h"
#include "layer/sanitizers.h"

#if defined(ALLFINITE_SIMT_UCONTEXT) || !defined(__x86_64__)
#include <ucontext.h>
#define ALLFINITE_SIMT_USES_UCONTEXT 1
#endif

namespace allfinite::simt {

enum class FiberState : unsigned char { kRunnable, kWaiting, kDone };

struct Fiber {
  ThreadInfo info{};
  FiberState state = FiberState::kDone;
  const char* waits_for = "";
  Site site{"", 0};

  unsigned char* stack = nullptr;
#if defined(ALLFINITE_SIMT_USES_UCONTEXT)
  ucontext_t context;
#else
  void* stack_pointer = nullptr;
#endif
#if defined(ALLFINITE_SIMT_ASAN)
  void* fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_size = 0;
#endif
#if defined(ALLFINITE_SIMT_TSAN)
  void* tsan_fiber = nullptr;
#endif
};

// Makes `fiber` start at `entry`, which never returns, when it is first switched to.
void prepare_fiber(Fiber& fiber, void (*entry)());
// Makes `fiber` stand for the stack that the caller runs on.
void adopt_current_stack(Fiber& fiber);
void switch_fiber(Fiber& from, Fiber& to, bool for_good);
// Must be the first call of an entry function.
void entered_fiber();
// Forgets the sanitizers' part of fibers that will not run again, but for the `keep` newest.
void retire_fiber(Fiber& fiber);
void destroy_retired_fibers(size_t keep);

}  // namespace allfinite::simt
