// Stacks and switches of the fibers, and what the sanitizers must be told about them.
#include "layer/fiber.h"

#include <sys/mman.h>

#include <deque>

#if !defined(ALLFINITE_SIMT_USES_UCONTEXT)
// Saves the callee-saved registers on the old stack, takes the new stack, restores.
extern "C" void allfinite_simt_swap_stack(void** save, void* load);
asm(R"(
.text
.globl allfinite_simt_swap_stack
.type allfinite_simt_swap_stack,@function
allfinite_simt_swap_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size allfinite_simt_swap_stack,.-allfinite_simt_swap_stack
)");
#endif

namespace allfinite::simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGuardBytes = 4096;

// A fresh mapping has no history: under ThreadSanitizer the frames of the thread that had the stack before
// would look like races, so it gets a new one each time.
#if defined(ALLFINITE_SIMT_TSAN)
constexpr bool kReuseStacks = false;
#else
constexpr bool kReuseStacks = true;
#endif

void provide_stack(Fiber& fiber) {
  if (fiber.stack && kReuseStacks) {
    return;
  }
  if (fiber.stack) {
    munmap(fiber.stack, kGuardBytes + kStackBytes);
  }
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error("no memory for a thread's stack");
  }
  mprotect(memory, kGuardBytes, PROT_NONE);  // an overflow of the stack faults here
  fiber.stack = static_cast<unsigned char*>(memory);
}

#if defined(ALLFINITE_SIMT_TSAN)
thread_local std::deque<void*> retired;
#endif

}  // namespace

void prepare_fiber(Fiber& fiber, void (*entry)()) {
  Unwatched unwatched;
  provide_stack(fiber);
  unsigned char* base = fiber.stack + kGuardBytes;
#if defined(ALLFINITE_SIMT_ASAN)
  fiber.stack_bottom = base;
  fiber.stack_size = kStackBytes;
  fiber.fake_stack = nullptr;
  ASAN_UNPOISON_MEMORY_REGION(base, kStackBytes);  // the last thread on this stack never left its frames
#endif
#if defined(ALLFINITE_SIMT_TSAN)
  fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
#if defined(ALLFINITE_SIMT_USES_UCONTEXT)
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = base;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  void** top = reinterpret_cast<void**>(base + kStackBytes);
  *--top = nullptr;                         // the stack is 16-byte aligned at the entry, as after a call
  *--top = reinterpret_cast<void*>(entry);  // where `ret` goes
  for (int registers = 0; registers < 6; ++registers) {
    *--top = nullptr;
  }
  fiber.stack_pointer = top;
#endif
}

void adopt_current_stack([[maybe_unused]] Fiber& fiber) {
#if defined(ALLFINITE_SIMT_TSAN)
  fiber.tsan_fiber = __tsan_get_current_fiber();
#endif
#if defined(ALLFINITE_SIMT_ASAN)
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  void* bottom = nullptr;
  pthread_attr_getstack(&attributes, &bottom, &fiber.stack_size);
  pthread_attr_destroy(&attributes);
  fiber.stack_bottom = bottom;
#endif
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool for_good) {
  current = &to.info;
#if defined(ALLFINITE_SIMT_ASAN)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack_bottom, to.stack_size);
#endif
#if defined(ALLFINITE_SIMT_TSAN)
  constexpr unsigned kNoSynchronisation = 1;
  __tsan_switch_to_fiber(to.tsan_fiber, kNoSynchronisation);
#endif
#if defined(ALLFINITE_SIMT_USES_UCONTEXT)
  swapcontext(&from.context, &to.context);
#else
  allfinite_simt_swap_stack(&from.stack_pointer, to.stack_pointer);
#endif
#if defined(ALLFINITE_SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void entered_fiber() {
#if defined(ALLFINITE_SIMT_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

void retire_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(ALLFINITE_SIMT_TSAN)
  retired.push_back(fiber.tsan_fiber);
#endif
}

// ThreadSanitizer gives a destroyed fiber's id out again, which hides races with its old owner; it takes some
// 8000.
void destroy_retired_fibers([[maybe_unused]] size_t keep) {
#if defined(ALLFINITE_SIMT_TSAN)
  while (retired.size() > keep) {
    __tsan_destroy_fiber(retired.front());
    retired.pop_front();
  }
#endif
}

}  // namespace allfinite::simt
