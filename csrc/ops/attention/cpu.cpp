// scaled_dot_product_attention: the forward's inner op on the CPU. Packs the tensors of one (batch, kv_head) at a time,
// cuts the work into tasks, owns all memory.
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "ops/attention/packed.h"

namespace allfinite::attention {

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

namespace {

std::tuple<Tensor, Tensor, Tensor> forward_narrow(const Tensor& query, const Tensor& key, const Tensor& value,
                                                  const OptionalTensor& mask, const OptionalTensor& seed,
                                                  const Options& options) {
  const auto compute = query.options().dtype(compute_dtype(query, mask));
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2);
  const Tensor output = at::empty({batch, heads, queries, value.size(3)}, query.options());
  const Tensor lse = at::empty({batch, heads, queries}, compute);
  const Tensor stats = at::empty({batch, heads, queries, cpu::kAttentionStats + value.size(3)}, compute);
  if (lse.numel() == 0) {
    return {output, lse, stats};
  }
  const Packed q(query, kRows, true), k(key, kTransposed, false), v(value, kRows, false);
  cpu::AttentionForwardArgs args{};
  args.problem = describe_problem(query, key, value, mask, seed, options);
  args.value = v.source();
  args.output = output.data_ptr();
  args.lse = lse.data_ptr();
  args.stats = stats.data_ptr();
  const auto& p = args.problem;
  const int64_t group = p.heads / p.kv_heads, tiles = at::divup(queries, cpu::kAttentionRows);
  const int64_t tile_work = cpu::kAttentionRows * p.keys * (p.depth + p.value_depth);
  const int64_t bytes = q.bytes(group) + k.bytes(1) + v.bytes(1);
  for_each_slice(p, bytes, group * tiles * tile_work, [&](uint8_t* memory, int64_t slice) {
    auto part = args;
    char* free = reinterpret_cast<char*>(memory);
    part.problem.query = q.place(free, slice * group, group);
    part.problem.key = k.place(free, slice, 1);
    part.problem.value = v.place(free, slice, 1);
    q.fill(part.problem.query, slice * group, (slice + 1) * group);
    k.fill(part.problem.key, slice, slice + 1);
    v.fill(part.problem.value, slice, slice + 1);
    const int64_t columns = part.problem.value.padded_columns;
    run_tasks(threads_for(group * tiles, tile_work), group * tiles, [&](const auto& next) {
      auto mine = part;
      const Tensor own =
          scratch(cpu::kAttentionRows * (cpu::kAttentionKeys + columns) + 2 * cpu::kAttentionKeys + columns,
                  mine.problem.dtype);
      mine.scratch = own.data_ptr();
      // The last rows first: under a causal mask they have the most to do.
      for (int64_t i = next(); i >= 0; i = next()) {
        mine.begin = (slice + 1) * group * tiles - 1 - i;
        mine.end = mine.begin + 1;
        cpu::attention_forward(mine);
      }
    });
  });
  return {output, lse, stats};
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

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_scaled_dot_product_attention_forward", forward_cpu);
}

}  // namespace allfinite::attention
