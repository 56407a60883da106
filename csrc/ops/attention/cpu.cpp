// scaled_dot_product_attention: the inner ops on the CPU. Packs the tensors, cuts the work into tasks, owns all memory.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention/attention.h"
#include "ops/attention/attention.h"
#include "ops/cpu_dtype.h"

namespace allfinite::attention {
namespace {

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// At least 2^20 multiply-adds to a thread.
int64_t grain(int64_t task_work) {
  return std::max<int64_t>(1, (int64_t{1} << 20) / std::max<int64_t>(task_work, 1));
}

Tensor with_dense_rows(const Tensor& t) {
  return t.stride(3) == 1 || t.size(3) <= 1 ? t : t.contiguous();
}

cpu::AttentionTensor describe(const Tensor& t) {
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), cpu_dtype(t.scalar_type())};
}

enum Form { kRows = 1, kTransposed = 2 };

// A tensor and its packed form. per_row: an exponent a row, else one a (batch, head).
class Packed {
 public:
  Packed(const Tensor& given, int forms, bool per_row, const Tensor& beside = {})
      : source_(with_dense_rows(given)), beside_(beside) {
    const int64_t slices = given.size(0) * given.size(1), rows = given.size(2), columns = given.size(3);
    const auto options = given.options().dtype(given.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    packed_.heads = given.size(1);
    packed_.rows = rows;
    packed_.columns = columns;
    packed_.padded_rows = round_up(rows, cpu::kAttentionRowAlign);
    packed_.padded_columns = round_up(columns, cpu::kAttentionColumnAlign);
    packed_.tile_width = std::min(cpu::kAttentionKeys, round_up(rows, cpu::kAttentionColumnAlign));
    packed_.per_row = per_row;
    if (forms & kRows) {
      row_major_ = at::empty({slices, packed_.padded_rows, packed_.padded_columns}, options);
      packed_.row_major = row_major_.data_ptr();
    }
    if (forms & kTransposed) {
      const int64_t tiles = at::divup(rows, cpu::kAttentionKeys);
      transposed_ = at::empty({slices, tiles, columns, packed_.tile_width}, options);
      packed_.transposed = transposed_.data_ptr();
    }
    non_finite_ = at::empty({slices, packed_.padded_rows}, options.dtype(at::kByte));
    packed_.non_finite = non_finite_.data_ptr<uint8_t>();
    exponents_ = at::empty({slices, per_row ? packed_.padded_rows : 1}, options.dtype(at::kInt));
    packed_.exponents = exponents_.data_ptr<int32_t>();
    largest_ = at::empty({slices}, options);
    packed_.largest = largest_.data_ptr();
    fill(slices, rows * columns);
  }

  const cpu::AttentionPacked& view() const { return packed_; }
  cpu::AttentionTensor source() const { return describe(source_); }

 private:
  void fill(int64_t slices, int64_t slice_size) {
    cpu::AttentionPackArgs args{};
    args.source = describe(source_);
    args.packed = packed_;
    args.beside = beside_.defined() ? beside_.const_data_ptr() : nullptr;
    at::parallel_for(0, slices, grain(16 * slice_size), [&](int64_t begin, int64_t end) {
      auto part = args;
      part.begin = begin;
      part.end = end;
      cpu::attention_pack(part);
    });
  }

  Tensor source_, beside_, row_major_, transposed_, non_finite_, exponents_, largest_;
  cpu::AttentionPacked packed_{};
};

// Everything but the packed tensors.
cpu::AttentionProblem describe_problem(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const OptionalTensor& mask, const OptionalTensor& seed, const Options& options) {
  constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max() / 4;
  const auto bound = [](int64_t n) { return n < 0 || n > kUnbounded ? kUnbounded : n; };
  cpu::AttentionProblem p{};
  p.batch = query.size(0);
  p.heads = query.size(1);
  p.kv_heads = key.size(1);
  p.queries = query.size(2);
  p.keys = key.size(2);
  p.depth = query.size(3);
  p.value_depth = value.size(3);
  p.dtype = cpu_dtype(query.scalar_type());
  p.scale = options.scale.value_or(p.depth ? 1 / std::sqrt(static_cast<double>(p.depth)) : 1.0);
  p.softcap = options.softcap;
  p.left = bound(options.left);
  p.right = bound(options.right);
  p.dropout_p = options.dropout_p;
  p.seed = seed ? static_cast<uint64_t>(*seed->const_data_ptr<int64_t>()) : 0;
  if (mask) {
    p.mask = mask->const_data_ptr();
    p.mask_is_bool = mask->scalar_type() == at::kBool;
    p.mask_dtype = p.mask_is_bool ? cpu::DType::kFloat32 : cpu_dtype(mask->scalar_type());
    for (int64_t d = 0; d < 4; ++d) {
      p.mask_stride[d] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
  }
  return p;
}

// A thread's memory, in elements of the accumulate type.
Tensor scratch(int64_t elements, cpu::DType dtype) {
  return at::empty({elements}, dtype == cpu::DType::kFloat64 ? at::kDouble : at::kFloat);
}

// `args` for tasks begin to end, on as many threads as that is worth.
template <class Args, class Run>
void run_tasks(Args args, int64_t tasks, int64_t task_work, int64_t scratch_elements, Run run) {
  at::parallel_for(0, tasks, grain(task_work), [&](int64_t begin, int64_t end) {
    auto part = args;
    const Tensor memory = scratch(scratch_elements, args.problem.dtype);
    part.scratch = memory.data_ptr();
    part.begin = begin;
    part.end = end;
    run(part);
  });
}

// --- forward -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> forward_narrow(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const OptionalTensor& mask, const OptionalTensor& seed,
                                                  const Options& options) {
  const auto compute = query.options().dtype(compute_dtype(query, mask));
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const Tensor output = at::empty({batch, heads, queries, value.size(3)}, query.options());
  const Tensor lse = at::empty({batch, heads, queries}, compute);
  const Tensor stats = at::empty({batch, heads, queries, cpu::kAttentionStats}, compute);
  if (lse.numel() == 0) {
    return {output, lse, stats};
  }
  const Packed q(query, kRows, true), k(key, kTransposed, false), v(value, kRows, false);
  cpu::AttentionForwardArgs args{};
  args.problem = describe_problem(query, key, value, mask, seed, options);
  args.problem.query = q.view();
  args.problem.key = k.view();
  args.problem.value = v.view();
  args.value = v.source();
  args.output = output.data_ptr();
  args.lse = lse.data_ptr();
  args.stats = stats.data_ptr();
  const auto& p = args.problem;
  const int64_t columns = p.value.padded_columns;
  run_tasks(args, batch * heads * at::divup(queries, cpu::kAttentionRows),
            cpu::kAttentionRows * p.keys * (p.depth + p.value_depth),
            cpu::kAttentionRows * (cpu::kAttentionKeys + columns) + 2 * cpu::kAttentionKeys + columns,
            [](const auto& part) { cpu::attention_forward(part); });
  return {output, lse, stats};
}

// An fp64 mask beside narrower tensors: all of it in fp64, so that what the mask says is kept.
bool widens(const Tensor& query, const OptionalTensor& mask) {
  return compute_dtype(query, mask) == at::kDouble && query.scalar_type() != at::kDouble;
}

std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const OptionalTensor& mask, const OptionalTensor& seed, double dropout_p,
                                               std::optional<double> scale, double softcap, int64_t left,
                                               int64_t right) {
  const Options options{dropout_p, scale, softcap, left, right};
  if (!widens(query, mask)) {
    return forward_narrow(query, key, value, mask, seed, options);
  }
  const auto [output, lse, stats] =
      forward_narrow(query.to(at::kDouble), key.to(at::kDouble), value.to(at::kDouble), mask, seed, options);
  return {output.to(query.scalar_type()), lse.to(at::kFloat), stats};
}

// --- backward ------------------------------------------------------------------------------------------------------

struct Gradients {
  Tensor query, key, value, mask;
};

// delta, and the gradients of query and mask.
Tensor run_rows(cpu::AttentionRowsArgs args, const Tensor& stats, const Tensor& grad_lse, const OptionalTensor& mask,
                const Gradients& grads) {
  auto& p = args.problem;
  const Tensor delta = at::empty({p.batch, p.heads, p.queries}, stats.options());
  args.stats = stats.const_data_ptr();
  args.grad_lse = grad_lse.defined() ? grad_lse.const_data_ptr() : nullptr;
  args.delta = delta.data_ptr();
  args.grad_query = grads.query.defined() ? grads.query.data_ptr() : nullptr;
  args.grad_mask = grads.mask.defined() ? grads.mask.data_ptr() : nullptr;
  args.span = round_up(p.keys, cpu::kAttentionKeys);
  // P, dP and slope of a tile stay within 8 MB where they can.
  const int64_t row_bytes = 3 * args.span * static_cast<int64_t>(stats.element_size());
  const int64_t fitting = (int64_t{8} << 20) / std::max<int64_t>(row_bytes, 1);
  args.tile_rows = std::clamp(fitting / cpu::kAttentionRowAlign * cpu::kAttentionRowAlign, cpu::kAttentionRowAlign,
                              cpu::kAttentionRows);
  const int64_t full[] = {p.batch, p.heads, at::divup(p.queries, args.tile_rows)};
  for (int d = 0; d < 4 && args.grad_mask; ++d) {
    args.mask_size[d] = mask->size(d);
  }
  for (int d = 0; d < 3; ++d) {
    args.tasks[d] = args.grad_mask && args.mask_size[d] == 1 ? 1 : full[d];
  }
  const int64_t tasks = args.tasks[0] * args.tasks[1] * args.tasks[2];
  const int64_t work =
      p.batch * p.heads * p.queries / std::max<int64_t>(tasks, 1) * p.keys * (2 * p.depth + p.value_depth);
  const int64_t elements =
      args.tile_rows * (3 * args.span + p.key.padded_columns) + 2 * cpu::kAttentionKeys + p.key.padded_columns;
  run_tasks(args, tasks, work, elements, [](const cpu::AttentionRowsArgs& given) {
    auto part = given;
    const Tensor sums = part.grad_mask ? at::empty({part.tile_rows * part.problem.keys}, at::kDouble) : Tensor();
    part.mask_scratch = sums.defined() ? sums.data_ptr<double>() : nullptr;
    cpu::attention_backward_rows(part);
  });
  return delta;
}

void run_keys(cpu::AttentionKeysArgs args, const Tensor& stats, const Tensor& delta, const Gradients& grads) {
  const auto& p = args.problem;
  args.stats = stats.const_data_ptr();
  args.delta = delta.const_data_ptr();
  args.grad_key = grads.key.defined() ? grads.key.data_ptr() : nullptr;
  args.grad_value = grads.value.defined() ? grads.value.data_ptr() : nullptr;
  const int64_t columns = p.query.padded_columns + p.grad.padded_columns;
  const int64_t elements = 3 * (cpu::kAttentionRows * cpu::kAttentionKeys + cpu::kAttentionColumnAlign) +
                           2 * cpu::kAttentionKeys +
                           (round_up(cpu::kAttentionKeys, cpu::kAttentionRowAlign) + 1) * columns;
  run_tasks(args, p.batch * p.kv_heads * at::divup(p.keys, cpu::kAttentionKeys),
            p.heads / p.kv_heads * p.queries * cpu::kAttentionKeys * 2 * (p.depth + p.value_depth), elements,
            [](const auto& part) { cpu::attention_backward_keys(part); });
}

void backward_narrow(const OptionalTensor& grad_output, const OptionalTensor& grad_lse, const Tensor& query,
                     const Tensor& key, const Tensor& value, const OptionalTensor& mask, const OptionalTensor& seed,
                     const Tensor& stats, const Options& options, const Gradients& grads) {
  const Tensor grad = grad_output ? grad_output->to(query.scalar_type())
                                  : at::zeros({1}, query.options())
                                        .expand({query.size(0), query.size(1), query.size(2), value.size(3)})
                                        .contiguous();
  const Tensor dlse = grad_lse ? grad_lse->to(stats.scalar_type()).contiguous() : Tensor();
  const Packed q(query, kRows, true), k(key, kRows | kTransposed, false), v(value, kTransposed, false),
      dout(grad, kRows, true, dlse);
  auto problem = describe_problem(query, key, value, mask, seed, options);
  problem.query = q.view();
  problem.key = k.view();
  problem.value = v.view();
  problem.grad = dout.view();
  cpu::AttentionRowsArgs rows{};
  rows.problem = problem;
  rows.key = k.source();
  const Tensor saved = stats.contiguous();
  const Tensor delta = run_rows(rows, saved, dlse, mask, grads);
  if (grads.key.defined() || grads.value.defined()) {
    cpu::AttentionKeysArgs keys{};
    keys.problem = problem;
    keys.query = q.source();
    keys.grad = dout.source();
    run_keys(keys, saved, delta, grads);
  }
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
  m.impl("_scaled_dot_product_attention_forward", forward_cpu);
  m.impl("_scaled_dot_product_attention_backward", backward_cpu);
}

}  // namespace allfinite::attention
