// scaled_dot_product_attention on the CPU: packed tensors in memory that a task owns, and the threads that do the
// tasks.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/attention/attention.h"
#include "ops/attention/attention.h"
#include "ops/cpu_dtype.h"

namespace allfinite::attention {

inline int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// --- threads -------------------------------------------------------------------------------------------------------

// As many threads as `tasks` of `task_work` multiply-adds are worth: at least 2^20 to a thread.
inline int64_t threads_for(int64_t tasks, int64_t task_work) {
  const int64_t worth = std::max<int64_t>(1, tasks * std::max<int64_t>(task_work, 1) >> 20);
  return at::in_parallel_region() ? 1 : std::min<int64_t>({worth, tasks, at::get_num_threads()});
}

// worker(next) on `threads` threads at once; next() gives the tasks 0 to `tasks` - 1, each once, then -1. Whoever is
// free takes the next one, so tasks of unequal size (a causal mask) keep all threads busy; no result depends on who did
// what.
template <class Worker>
void run_tasks(int64_t threads, int64_t tasks, const Worker& worker) {
  std::atomic<int64_t> counter{0};
  const auto next = [&]() -> int64_t {
    const int64_t task = counter.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? task : -1;
  };
  if (threads <= 1) {
    worker(next);
    return;
  }
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      worker(next);
    }
  });
}

// A task's memory, in elements of the accumulate type.
inline Tensor scratch(int64_t elements, cpu::DType dtype) {
  return at::empty({elements}, dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat);
}

// --- packed tensors ------------------------------------------------------------------------------------------------

enum Form { kRows = 1, kTransposed = 2 };

inline cpu::AttentionTensor describe(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), cpu_dtype(t.scalar_type())};
}

// A tensor and the packed form of some of its slices. per_row: an exponent a row, else one a (batch, head).
class Packed {
 public:
  Packed(const Tensor& given, int forms, bool per_row)
      : source_(given.stride(3) == 1 || given.size(3) <= 1 ? given : given.contiguous()),
        forms_(forms),
        element_(given.scalar_type() == at::kDouble ? sizeof(double) : sizeof(float)) {
    layout_.heads = given.size(1);
    layout_.rows = given.size(2);
    layout_.columns = given.size(3);
    layout_.padded_rows = round_up(layout_.rows, cpu::kAttentionRowAlign);
    layout_.padded_columns = round_up(layout_.columns, cpu::kAttentionColumnAlign);
    layout_.tile_width = std::min(cpu::kAttentionKeys, round_up(layout_.rows, cpu::kAttentionColumnAlign));
    layout_.per_row = per_row;
  }

  cpu::AttentionTensor source() const { return describe(source_); }

  int64_t bytes(int64_t slices) const {
    char* end = nullptr;
    place(end, 0, slices);
    return end - static_cast<char*>(nullptr);
  }

  // Where slices [first, first + slices) lie from `memory` on, which is moved behind them.
  cpu::AttentionPacked place(char*& memory, int64_t first, int64_t slices) const {
    const auto take = [&](int64_t bytes) {
      char* taken = memory;
      memory += round_up(bytes, 64) + 64;  // so that equal sizes do not meet in the same sets of a cache
      return taken;
    };
    cpu::AttentionPacked p = layout_;
    p.first = first;
    const int64_t rows = slices * p.padded_rows;
    if (forms_ & kRows) {
      p.row_major = take(rows * p.padded_columns * element_);
    }
    if (forms_ & kTransposed) {
      p.transposed = take(slices * at::divup(p.rows, cpu::kAttentionKeys) * p.columns * p.tile_width * element_);
    }
    p.non_finite = reinterpret_cast<uint8_t*>(take(rows));
    p.state = reinterpret_cast<uint8_t*>(take(slices));
    p.exponents = reinterpret_cast<int32_t*>(take((p.per_row ? rows : slices) * sizeof(int32_t)));
    p.largest = take(slices * element_);
    return p;
  }

  void fill(const cpu::AttentionPacked& placed, int64_t begin, int64_t end) const {
    cpu::AttentionPackArgs args{};
    args.source = describe(source_);
    args.packed = placed;
    args.begin = begin;
    args.end = end;
    cpu::attention_pack(args);
  }

 private:
  Tensor source_;
  int forms_;
  int64_t element_;
  cpu::AttentionPacked layout_{};
};

// --- problem -------------------------------------------------------------------------------------------------------

// Everything but the packed tensors.
cpu::AttentionProblem describe_problem(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const OptionalTensor& mask, const OptionalTensor& seed, const Options& options);

// An fp64 mask beside narrower tensors: all of it in fp64, so that what the mask says is kept.
inline bool widens(const Tensor& query, const OptionalTensor& mask) {
  return compute_dtype(query, mask) == at::kDouble && query.scalar_type() != at::kDouble;
}

// work(memory, slice) for each (batch, kv_head); memory: `bytes` of this thread. Whole slices go to threads where there
// are enough of them to keep all busy; else one slice comes after the other, and `work` shares each out.
template <class Work>
void for_each_slice(const cpu::AttentionProblem& p, int64_t bytes, int64_t slice_work, const Work& work) {
  const int64_t slices = p.batch * p.kv_heads, threads = threads_for(slices, slice_work);
  const bool enough = slices % threads == 0 || slices >= 4 * threads;
  run_tasks(enough ? threads : 1, slices, [&](const auto& next) {
    const Tensor memory = at::empty({bytes}, at::kByte);
    for (int64_t slice = next(); slice >= 0; slice = next()) {
      work(memory.data_ptr<uint8_t>(), slice);
    }
  });
}

}  // namespace allfinite::attention
