// scaled_dot_product_attention: the backward's inner op on the CPU. Packs the tensors, cuts the work into tasks, owns
// all memory.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "ops/attention/packed.h"

namespace allfinite::attention {
namespace {

struct Gradients {
  Tensor query, key, value, mask;
};

void* data_or_null(const Tensor& t) {
  return t.defined() ? t.data_ptr() : nullptr;
}

class Backward {
 public:
  Backward(const Tensor& grad, const Tensor& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
           const cpu::AttentionProblem& problem, const Tensor& stats, const Gradients& grads)
      : problem_(problem),
        grads_(grads),
        stats_(stats.contiguous()),
        grad_lse_(grad_lse),
        delta_(at::empty({problem.batch, problem.heads, problem.queries, cpu::kAttentionDelta}, stats.options())),
        query_(query, kRows, true),
        key_(key, kRows | kTransposed, false),
        value_(value, kTransposed, false),
        grad_(grad, kRows, true),
        group_(problem.heads / problem.kv_heads),
        tiles_(at::divup(problem.keys, cpu::kAttentionKeys)),
        tile_work_(group_ * problem.queries * cpu::kAttentionKeys * (3 * problem.depth + 2 * problem.value_depth)) {}

  void run(const OptionalTensor& mask) {
    const int64_t slices = problem_.batch * problem_.kv_heads;
    Tensor all;
    if (grads_.mask.defined()) {  // its sums go over batches and heads, so all of them are packed at once
      all = at::empty({bytes(slices)}, at::kByte);
      place(problem_, all.data_ptr<uint8_t>(), 0, slices);
      run_tasks(threads_for(slices, 16 * problem_.keys * problem_.depth), slices, [&](const auto& next) {
        for (int64_t slice = next(); slice >= 0; slice = next()) {
          pack(problem_, slice);
        }
      });
      run_mask(*mask);
    }
    if (!grads_.query.defined() && !grads_.key.defined() && !grads_.value.defined()) {
      return;
    }
    for_each_slice(problem_, all.defined() ? 0 : bytes(1), tiles_ * tile_work_, [&](uint8_t* memory, int64_t slice) {
      auto problem = problem_;
      if (!all.defined()) {
        place(problem, memory, slice, 1);
        pack(problem, slice);
      }
      run_slice(problem, slice);
    });
  }

 private:
  int64_t bytes(int64_t slices) const {
    return query_.bytes(slices * group_) + grad_.bytes(slices * group_) + key_.bytes(slices) + value_.bytes(slices);
  }

  // Slices of the key's heads, with those of the query's that go with them.
  void place(cpu::AttentionProblem& problem, uint8_t* memory, int64_t first, int64_t slices) const {
    char* free = reinterpret_cast<char*>(memory);
    problem.query = query_.place(free, first * group_, slices * group_);
    problem.grad = grad_.place(free, first * group_, slices * group_);
    problem.key = key_.place(free, first, slices);
    problem.value = value_.place(free, first, slices);
  }

  // One of them, and delta of its rows.
  void pack(const cpu::AttentionProblem& problem, int64_t slice) const {
    query_.fill(problem.query, slice * group_, (slice + 1) * group_);
    grad_.fill(problem.grad, slice * group_, (slice + 1) * group_);
    key_.fill(problem.key, slice, slice + 1);
    value_.fill(problem.value, slice, slice + 1);
    cpu::AttentionDeltaArgs args{};
    args.problem = problem;
    args.stats = stats_.const_data_ptr();
    args.grad_lse = grad_lse_.defined() ? grad_lse_.const_data_ptr() : nullptr;
    args.delta = delta_.data_ptr();
    args.begin = slice * group_;
    args.end = (slice + 1) * group_;
    cpu::attention_delta(args);
  }

  // Chunks of key tiles, each with its share of dQ: on one thread each is added to the first as soon as it is done, on
  // several all are added at the end, in the same order.
  void run_slice(const cpu::AttentionProblem& problem, int64_t slice) const {
    const int64_t chunks = at::divup(tiles_, cpu::kAttentionChunkTiles);
    const int64_t threads = threads_for(chunks, cpu::kAttentionChunkTiles * tile_work_);
    const int64_t size = group_ * problem.query.padded_rows * problem.query.padded_columns;
    const int64_t count = threads > 1 ? chunks : std::min<int64_t>(chunks, 2);
    const Tensor parts = grads_.query.defined() ? scratch(count * size, problem.dtype) : Tensor();
    run_tasks(threads, chunks, [&](const auto& next) {
      const Tensor own = scratch(cpu::attention_backward_scratch(problem), problem.dtype);
      for (int64_t chunk = next(); chunk >= 0; chunk = next()) {
        const int64_t part = std::min(chunk, count - 1);
        run_chunk(problem, slice, chunk, own, parts.defined() ? parts.narrow(0, part * size, size) : parts);
        if (parts.defined() && count < chunks && part > 0) {
          query_grad(problem, slice, parts, 2, false, 0, problem.queries);
        }
      }
    });
    if (parts.defined()) {
      const int64_t left = count < chunks ? 1 : count;
      const int64_t blocks = at::divup(problem.queries, cpu::kAttentionRows);
      run_tasks(threads > 1 ? std::min(threads, blocks) : 1, blocks, [&](const auto& next) {
        for (int64_t i = next(); i >= 0; i = next()) {
          const int64_t row = i * cpu::kAttentionRows;
          query_grad(problem, slice, parts, left, true, row, std::min(row + cpu::kAttentionRows, problem.queries));
        }
      });
    }
  }

  void run_chunk(const cpu::AttentionProblem& problem, int64_t slice, int64_t chunk, const Tensor& own,
                 const Tensor& sums) const {
    if (sums.defined()) {
      sums.zero_();
    }
    cpu::AttentionBackwardArgs args{};
    args.problem = problem;
    args.query = query_.source();
    args.key = key_.source();
    args.grad = grad_.source();
    args.stats = stats_.const_data_ptr();
    args.delta = delta_.const_data_ptr();
    args.grad_key = data_or_null(grads_.key);
    args.grad_value = data_or_null(grads_.value);
    args.query_sums = data_or_null(sums);
    args.scratch = own.data_ptr();
    args.slice = slice;
    args.begin = chunk * cpu::kAttentionChunkTiles;
    args.end = std::min(args.begin + cpu::kAttentionChunkTiles, tiles_);
    cpu::attention_backward(args);
  }

  void query_grad(const cpu::AttentionProblem& problem, int64_t slice, const Tensor& parts, int64_t count, bool write,
                  int64_t begin, int64_t end) const {
    cpu::AttentionQueryGradArgs args{};
    args.problem = problem;
    args.delta = delta_.const_data_ptr();
    args.parts = parts.data_ptr();
    args.count = count;
    args.grad_query = write ? grads_.query.data_ptr() : nullptr;
    args.slice = slice;
    args.begin = begin;
    args.end = end;
    cpu::attention_query_grad(args);
  }

  void run_mask(const Tensor& mask) const {
    const auto& p = problem_;
    cpu::AttentionMaskGradArgs args{};
    args.problem = p;
    args.stats = stats_.const_data_ptr();
    args.delta = delta_.const_data_ptr();
    args.grad_mask = grads_.mask.data_ptr();
    const int64_t full[] = {p.batch, p.heads, at::divup(p.queries, cpu::kAttentionRows)};
    for (int d = 0; d < 4; ++d) {
      args.mask_size[d] = mask.size(d);
    }
    for (int d = 0; d < 3; ++d) {
      args.tasks[d] = args.mask_size[d] == 1 ? 1 : full[d];
    }
    const int64_t tasks = args.tasks[0] * args.tasks[1] * args.tasks[2];
    const int64_t work = p.batch * p.heads * p.queries / tasks * p.keys * (p.depth + p.value_depth);
    run_tasks(threads_for(tasks, work), tasks, [&](const auto& next) {
      auto mine = args;
      const Tensor own = scratch(cpu::attention_backward_scratch(p), p.dtype);
      const Tensor sums = at::empty({cpu::kAttentionRows * p.keys}, at::kDouble);
      mine.scratch = own.data_ptr();
      mine.sums = sums.data_ptr<double>();
      for (int64_t task = next(); task >= 0; task = next()) {
        mine.begin = task;
        mine.end = task + 1;
        cpu::attention_mask_grad(mine);
      }
    });
  }

  cpu::AttentionProblem problem_;
  const Gradients& grads_;
  Tensor stats_, grad_lse_, delta_;
  Packed query_, key_, value_, grad_;
  int64_t group_, tiles_, tile_work_;
};

void backward_narrow(const OptionalTensor& grad_output, const OptionalTensor& grad_lse, const Tensor& query,
                     const Tensor& key, const Tensor& value, const OptionalTensor& mask, const OptionalTensor& seed,
                     const Tensor& stats, const Options& options, const Gradients& grads) {
  const Tensor grad = grad_output ? grad_output->to(query.scalar_type())
                                  : at::zeros({1}, query.options())
                                        .expand({query.size(0), query.size(1), query.size(2), value.size(3)})
                                        .contiguous();
  const Tensor dlse = grad_lse ? grad_lse->to(stats.scalar_type()).contiguous() : Tensor();
  const auto problem = describe_problem(query, key, value, mask, seed, options);
  Backward(grad, dlse, query, key, value, problem, stats, grads).run(mask);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_cpu(
    const OptionalTensor& grad_output, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const OptionalTensor& mask, const OptionalTensor& seed, const Tensor& stats, double dropout_p,
    std::optional<double> scale, double softcap, int64_t left, int64_t right, std::array<bool, 4> output_mask) {
  const bool wide = widens(query, mask);
  const auto compute = wide ? at::kDouble : query.scalar_type();
  const auto like = [](bool wanted, const Tensor& t, at::ScalarType dtype) {
    return wanted ? at::empty(t.sizes(), t.options().dtype(dtype)) : Tensor();
  };
  const Gradients grads{like(output_mask[0], query, compute), like(output_mask[1], key, compute),
                        like(output_mask[2], value, compute),
                        output_mask[3] && mask ? like(true, *mask, mask->scalar_type()) : Tensor()};
  if (stats.numel() == 0 || key.size(2) == 0 || (!grad_output && !grad_lse)) {
    for (const Tensor& t : {grads.query, grads.key, grads.value, grads.mask}) {
      if (t.defined()) {
        t.zero_();
      }
    }
  } else {
    const auto widened = [&](const Tensor& t) { return t.to(compute); };
    backward_narrow(grad_output, grad_lse, widened(query), widened(key), widened(value), mask, seed, stats,
                    {dropout_p, scale, softcap, left, right}, grads);
  }
  const auto narrowed = [&](const Tensor& t) { return t.defined() ? t.to(query.scalar_type()) : t; };
  return {narrowed(grads.query), narrowed(grads.key), narrowed(grads.value), grads.mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_scaled_dot_product_attention_backward", backward_cpu);
}

}  // namespace allfinite::attention
