// Which sanitizer this build runs under, and the calls with which fibers are made known to it. Inside the
// layer only.
//
// ThreadSanitizer: every fiber is a thread of its own to it, so that it finds races between CUDA threads
// although all run in one. It learns of an order only from barriers, __syncwarp, fences and the end of a
// launch; shuffles and votes give none, as on a device. The layer's own files are compiled without
// -fsanitize=thread (and with ALLFINITE_SIMT_TSAN), so that only the kernels' accesses are watched.
#pragma once
#include <pthread.h>

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define ALLFINITE_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ALLFINITE_SIMT_ASAN 1
#endif
#endif

#if defined(ALLFINITE_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(ALLFINITE_SIMT_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace allfinite::simt {

inline void happens_after([[maybe_unused]] char& address) {
#if defined(ALLFINITE_SIMT_TSAN)
  __tsan_acquire(&address);
#endif
}
inline void happens_before([[maybe_unused]] char& address) {
#if defined(ALLFINITE_SIMT_TSAN)
  __tsan_release(&address);
#endif
}

// While one lives, ThreadSanitizer does not look: for the layer's own bookkeeping, and for memory that must
// start without a history. Never held across a switch.
struct Unwatched {
#if defined(ALLFINITE_SIMT_TSAN)
  Unwatched() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unwatched() {
    AnnotateIgnoreReadsEnd("", 0);
    AnnotateIgnoreWritesEnd("", 0);
  }
#else
  Unwatched() {}
#endif
};

// memcpy is intercepted by the sanitizers; this copy of a few bytes is not.
inline void copy_unwatched(void* to, const void* from, size_t size) {
  auto* target = static_cast<volatile unsigned char*>(to);
  auto* source = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < size; ++i) {
    target[i] = source[i];
  }
}

}  // namespace allfinite::simt
