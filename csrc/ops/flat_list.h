// A list of CPU tensors as one long stretch of memory, which can be cut into byte ranges of equal length: ten
// thousand small tensors then cost one parallel region, and no thread waits for the one with the largest tensor.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/dtype.h"

namespace allfinite {

// `count` numbers, `stride` numbers apart.
struct Run {
  void* data;
  int64_t count, stride;
  cpu::DType dtype;
};

class FlatList {
 public:
  // Every element of every tensor, complex ones as two numbers. For reading.
  static FlatList all_elements(at::TensorList tensors);

  // Every memory location once, however many elements of however many entries refer to it. For writing in place.
  // `op`: what an error is named after; entries that share memory must share whole numbers of one dtype.
  static FlatList distinct_memory(const char* op, at::TensorList tensors);

  int64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }

  // f(run) for the numbers that begin in bytes [begin, end): every number belongs to exactly one of adjacent ranges.
  template <class F>
  void visit(int64_t begin, int64_t end, F f) const {
    auto i = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (; i < pieces_.size(); ++i) {
      const Piece& piece = pieces_[i];
      const int64_t start = ends_[i] - piece.bytes();
      if (start >= end) {
        return;
      }
      const auto number = [&](int64_t byte) {
        return std::min(piece.count, (std::max<int64_t>(byte - start, 0) + piece.itemsize - 1) / piece.itemsize);
      };
      piece.visit(number(begin), number(end), f);
    }
  }

  // The sums of fixed chunks, in order, whatever the number of threads (F5): add(sums, run) for every run of a chunk.
  template <class Sums, class Add>
  std::vector<Sums> sums_of_chunks(Add add) const {
    constexpr int64_t kChunkBytes = 256 * 1024;
    std::vector<Sums> result(static_cast<size_t>(at::divup(bytes(), kChunkBytes)));
    at::parallel_for(0, static_cast<int64_t>(result.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        Sums sums{};
        visit(chunk * kChunkBytes, (chunk + 1) * kChunkBytes, [&](const Run& run) { add(sums, run); });
        result[static_cast<size_t>(chunk)] = sums;
      }
    });
    return result;
  }

  // f(begin, end) for ranges of bytes of all memory, in parallel.
  template <class F>
  void in_parallel(F f) const {
    constexpr int64_t kGrainBytes = 128 * 1024;  // to a thread, at least: 32 K fp32 numbers, as torch's own grain size
    at::parallel_for(0, bytes(), kGrainBytes, f);
  }

 private:
  struct Dim {
    int64_t size, stride;
    bool operator==(const Dim&) const = default;
  };

  // The numbers of one tensor, outermost dimension first; no dims: contiguous.
  struct Piece {
    char* data = nullptr;
    int64_t count = 0;
    int64_t itemsize = 1;
    cpu::DType dtype = cpu::DType::kFloat32;
    std::vector<Dim> dims;

    bool operator==(const Piece&) const = default;
    int64_t bytes() const { return count * itemsize; }
    char* memory_end() const;
    bool may_repeat() const;

    template <class F>
    void visit(int64_t begin, int64_t end, F&& f) const {
      if (dims.empty()) {
        if (begin < end) {
          f(Run{data + begin * itemsize, end - begin, 1, dtype});
        }
        return;
      }
      const Dim inner = dims.back();
      while (begin < end) {
        const int64_t column = begin % inner.size;
        int64_t row = begin / inner.size, offset = column * inner.stride;
        for (size_t d = dims.size() - 1; d-- > 0;) {
          offset += row % dims[d].size * dims[d].stride;
          row /= dims[d].size;
        }
        const int64_t count = std::min(end - begin, inner.size - column);
        f(Run{data + offset * itemsize, count, inner.stride, dtype});
        begin += count;
      }
    }
  };

  static Piece piece_of(const at::Tensor& tensor, bool distinct);
  static void resolve_sharing(const char* op, const Piece* begin, const Piece* end, std::vector<Piece>& out);
  explicit FlatList(std::vector<Piece> pieces);

  std::vector<Piece> pieces_;
  std::vector<int64_t> ends_;  // in bytes, cumulative
};

}  // namespace allfinite
