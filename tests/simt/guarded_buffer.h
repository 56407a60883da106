// Memory for a kernel's arguments with guard bands on both sides. Everything starts as 0xFF bytes, which is a
// NaN in every floating-point type: an element that is never written, or a read of a band, shows in the
// results. Under AddressSanitizer the band behind the data is closed, so that touching it stops the test.
#pragma once
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

// There at run time in a program with AddressSanitizer, also for files that are not compiled with it.
extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, size_t size);
extern "C" __attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* address, size_t size);

namespace allfinite::simt {

template <class T>
class GuardedBuffer {
 public:
  // data() is `offset` elements past a multiple of 64 bytes.
  explicit GuardedBuffer(size_t size, size_t offset = 0)
      : size_(size), front_(kBand + offset * sizeof(T)), bytes_(front_ + size * sizeof(T) + kBand) {
    memory_.reset(static_cast<unsigned char*>(::operator new(bytes_, std::align_val_t(kBand))));
    std::memset(memory_.get(), 0xFF, bytes_);
    close_back();
  }
  GuardedBuffer(const std::vector<T>& values, size_t offset) : GuardedBuffer(values.size(), offset) {
    std::memcpy(static_cast<void*>(data()), values.data(), values.size() * sizeof(T));
  }
  ~GuardedBuffer() { open_back(); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_.get() + front_); }
  std::vector<T> values() {
    std::vector<T> copy(size_);
    std::memcpy(static_cast<void*>(copy.data()), data(), size_ * sizeof(T));
    return copy;
  }

  // Whether nothing was written outside data().
  bool guards_intact() const {
    open_back();
    const bool intact = all_ones(memory_.get(), front_) && all_ones(back(), kBand);
    close_back();
    return intact;
  }

 private:
  static constexpr size_t kBand = 64;
  struct Free {
    void operator()(unsigned char* memory) const { ::operator delete(memory, std::align_val_t(kBand)); }
  };
  unsigned char* back() const { return memory_.get() + bytes_ - kBand; }
  void close_back() const {
    if (__asan_poison_memory_region) {
      __asan_poison_memory_region(back(), kBand);
    }
  }
  void open_back() const {
    if (__asan_unpoison_memory_region) {
      __asan_unpoison_memory_region(back(), kBand);
    }
  }
  static bool all_ones(const unsigned char* bytes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (bytes[i] != 0xFF) {
        return false;
      }
    }
    return true;
  }

  size_t size_, front_, bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

}  // namespace allfinite::simt
