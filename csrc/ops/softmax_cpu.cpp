// softmax on the CPU: rows, masks and their gradients as the kernels take them (cpu/softmax.h).
//
// Over any dimension but the last the kernels work on tiles of columns; only where a mask wants a gradient are rows
// brought together by a copy, and back by another. A mask is never expanded: its strides are passed on. Its gradient is
// a sum over the rows that share a row of the mask, in chunks that depend on the shapes alone (F5).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "cpu/softmax.h"
#include "ops/cpu_dtype.h"
#include "ops/softmax.h"

namespace allfinite::softmax_rows {
namespace {

constexpr int64_t kMinChunkRows = 32, kMaxChunks = 16;

// Half of torch's grain size: an exponential is dearer than its elementwise operations.
int64_t grain_rows(int64_t n) {
  return std::max<int64_t>(1, 16384 / n);
}

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : memory_(new std::byte[static_cast<size_t>(bytes) + 63]) {}
  std::byte* aligned() const {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return memory_.get() + ((64 - address % 64) % 64);
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

// How [outer, n, inner] is cut into pieces of work: rows, or tiles of columns.
struct Pieces {
  Pieces(const Tensor& input, int64_t dim) : n(input.size(dim)), element_size(input.element_size()) {
    for (int64_t d = dim + 1; d < input.dim(); ++d) {
      inner *= input.size(d);
    }
    const int64_t width = inner == 1 ? 1 : cpu::softmax_tile_columns(n, element_size);
    count = input.numel() / (n * inner) * at::divup(inner, width);
    grain = std::max<int64_t>(1, grain_rows(n) / width);
  }

  // Runs the kernel on all of them, with memory of its own for each thread.
  template <class Args>
  void run(Args args, void (*kernel)(const Args&)) const {
    args.n = n;
    args.inner = inner;
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      const int64_t own = cpu::softmax_scratch_bytes(n);
      const Scratch scratch(inner == 1 ? own : own + 3 * cpu::softmax_tile_bytes(n, element_size));
      auto part = args;
      part.scratch = scratch.aligned();
      part.tiles = scratch.aligned() + own;
      part.begin = begin;
      part.end = end;
      kernel(part);
    });
  }

  int64_t n, element_size, inner = 1, count = 0, grain = 1;
};

// [rows..., n]: the dimension of the softmax last, contiguous.
Tensor as_rows(const Tensor& t, int64_t dim) {
  return (dim == t.dim() - 1 ? t : t.movedim(dim, -1)).contiguous();
}

// Writes rows back to where they came from; `out` is rows itself where dim is the last.
void from_rows(const Tensor& rows, const Tensor& out, int64_t dim) {
  if (!rows.is_same(out)) {
    out.copy_(rows.movedim(-1, dim));
  }
}
Tensor rows_for(const Tensor& out, int64_t dim) {
  return dim == out.dim() - 1 ? out : at::empty(out.movedim(dim, -1).sizes(), out.options());
}

// `moved`: the mask with the dimension of the softmax last. False where its strides take too many numbers.
bool describe(const Tensor& moved, at::IntArrayRef rows, cpu::SoftmaxMask& mask) {
  mask.data = moved.const_data_ptr();
  mask.is_bool = moved.scalar_type() == at::kBool;
  mask.dtype = mask.is_bool ? cpu::DType::kFloat32 : cpu_dtype(moved.scalar_type());
  mask.step = moved.size(-1) == 1 ? 0 : moved.stride(-1);
  mask.dims = 0;
  for (int64_t d = 0; d + 1 < moved.dim(); ++d) {
    const int64_t size = rows[d], stride = moved.size(d) == 1 ? 0 : moved.stride(d);
    if (size == 1) {
      continue;
    }
    const int last = mask.dims - 1;
    if (last >= 0 && mask.stride[last] == size * stride) {  // one dimension with the one before it
      mask.size[last] *= size;
      mask.stride[last] = stride;
    } else if (mask.dims == cpu::kSoftmaxMaskDims) {
      return false;
    } else {
      mask.size[mask.dims] = size;
      mask.stride[mask.dims++] = stride;
    }
  }
  return true;
}

// Keeps what the description points to.
struct RowMask {
  RowMask(const OptionalTensor& given, const Tensor& input, int64_t dim) {
    if (!given) {
      return;
    }
    const Tensor shape = input.movedim(dim, -1);
    tensor = given->movedim(dim, -1);
    if (!describe(tensor, shape.sizes(), description)) {
      tensor = tensor.expand(shape.sizes()).contiguous();
      describe(tensor, shape.sizes(), description);
    }
  }
  Tensor tensor;
  cpu::SoftmaxMask description{};
};

// A float64 mask beside a narrower input is added in float64.
bool needs_double(const Tensor& input, const OptionalTensor& mask) {
  return mask && mask->scalar_type() == at::kDouble && input.scalar_type() != at::kDouble;
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& mask, int64_t dim, double scale,
                                   bool keep_numbers) {
  auto [output, numbers] = outputs_like(input, dim, keep_numbers);
  if (input.numel() == 0) {
    return {output, numbers};
  }
  if (needs_double(input, mask)) {  // backward will do without the numbers
    output.copy_(std::get<0>(forward(input.to(at::kDouble), mask, dim, scale, false)));
    return {output, numbers.zero_()};
  }
  const Tensor x = input.contiguous();
  const RowMask row_mask(mask, input, dim);
  cpu::SoftmaxForwardArgs args{};
  args.x = x.const_data_ptr();
  args.y = output.data_ptr();
  args.numbers = numbers.numel() != 0 ? static_cast<cpu::SoftmaxRowNumbers*>(numbers.data_ptr()) : nullptr;
  args.mask = row_mask.description;
  args.scale = scale;
  args.dtype = cpu_dtype(input.scalar_type());
  Pieces(x, dim).run(args, &cpu::softmax_forward);
  return {output, numbers};
}

// Positions of all elements over the dimensions `dims`, in order, with these strides.
std::vector<int64_t> positions(const std::vector<int64_t>& dims, at::IntArrayRef sizes,
                               const std::vector<int64_t>& strides) {
  std::vector<int64_t> result{0};
  for (const int64_t d : dims) {
    std::vector<int64_t> finer;
    finer.reserve(result.size() * sizes[d]);
    for (const int64_t start : result) {
      for (int64_t i = 0; i < sizes[d]; ++i) {
        finer.push_back(start + i * strides[d]);
      }
    }
    result = std::move(finer);
  }
  return result;
}

// Rows in the order of the mask's rows: group g of them, `members` long, shares row g of the mask.
struct MaskGroups {
  MaskGroups(const Tensor& mask_rows, at::IntArrayRef sizes) {
    const int64_t row_dims = mask_rows.dim() - 1;
    std::vector<int64_t> own, shared, stride(row_dims, 1), mask_stride = mask_rows.strides().vec();
    for (int64_t d = row_dims - 1; d >= 0; --d) {
      stride[d] = d + 1 < row_dims ? stride[d + 1] * sizes[d + 1] : 1;
    }
    for (int64_t d = 0; d < row_dims; ++d) {
      (mask_rows.size(d) == sizes[d] ? own : shared).push_back(d);
    }
    offsets = positions(own, sizes, mask_stride);
    const auto first = positions(own, sizes, stride), next = positions(shared, sizes, stride);
    members = static_cast<int64_t>(next.size());
    order.reserve(first.size() * next.size());
    for (const int64_t f : first) {
      for (const int64_t n : next) {
        order.push_back(f + n);
      }
    }
  }
  std::vector<int64_t> order, offsets;  // offsets: of the mask's rows, in elements
  int64_t members;
};

// dx where args want it, and the gradient of the mask.
void run_with_mask_gradient(const cpu::SoftmaxBackwardArgs& args, const Tensor& dmask, at::IntArrayRef sizes) {
  const MaskGroups groups(dmask, sizes);
  const int64_t n = args.n, count = static_cast<int64_t>(groups.offsets.size());
  const int64_t per_chunk = std::max(kMinChunkRows, at::divup(groups.members, kMaxChunks));
  const int64_t chunks = at::divup(groups.members, per_chunk);
  const auto finish = [&](int64_t group, const double* sums) {
    cpu::SoftmaxMaskGradientArgs last{};
    last.sums = sums;
    last.out = static_cast<char*>(dmask.data_ptr()) + groups.offsets[group] * dmask.element_size();
    last.chunks = chunks;
    last.n = n;
    last.whole = dmask.size(-1) == 1;
    last.step = dmask.stride(-1);
    last.dtype = cpu_dtype(dmask.scalar_type());
    cpu::softmax_mask_gradient(last);
  };
  const Tensor all_sums = chunks == 1 ? Tensor() : at::zeros({count, chunks, n}, at::kDouble);
  const int64_t grain = std::max<int64_t>(1, grain_rows(n) / std::min(per_chunk, groups.members));
  at::parallel_for(0, count * chunks, grain, [&](int64_t begin, int64_t end) {
    const Scratch scratch(cpu::softmax_scratch_bytes(n));
    const std::unique_ptr<double[]> own_sums(chunks == 1 ? new double[n] : nullptr);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / chunks, chunk = task % chunks;
      auto part = args;
      part.scratch = scratch.aligned();
      part.order = groups.order.data();
      part.begin = group * groups.members + chunk * per_chunk;
      part.end = std::min(part.begin + per_chunk, (group + 1) * groups.members);
      part.sums = own_sums ? own_sums.get() : all_sums.data_ptr<double>() + task * n;
      if (own_sums) {
        std::fill_n(part.sums, n, 0.0);
      }
      cpu::softmax_backward(part);
      if (own_sums) {
        finish(group, part.sums);
      }
    }
  });
  if (chunks > 1) {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        finish(group, all_sums.const_data_ptr<double>() + group * chunks * n);
      }
    });
  }
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Tensor& input, const OptionalTensor& mask,
                                    const Tensor& kept, int64_t dim, double scale, std::array<bool, 2> output_mask) {
  auto [dx, dmask] = gradients_like(input, mask, output_mask);
  if (input.numel() == 0) {
    return {dx, dmask.defined() ? dmask.zero_() : dmask};
  }
  TORCH_CHECK_VALUE(
      !is_narrow(input) || (kept.scalar_type() == at::kDouble && kept.numel() == input.numel() / input.size(dim) * 2),
      "allfinite::_softmax_backward: expected kept to be the numbers of _softmax_forward, but got ", kept.scalar_type(),
      " ", kept.sizes());
  if (is_narrow(input) && needs_double(input, mask)) {
    const Tensor wide = input.to(at::kDouble), y = std::get<0>(forward(wide, mask, dim, scale, false));
    auto [wide_dx, wide_dmask] = backward(grad, wide, mask, y, dim, scale, output_mask);
    return {dx.defined() ? dx.copy_(wide_dx) : dx, wide_dmask};
  }
  const bool by_rows = dmask.defined();
  const auto arranged = [&](const Tensor& t) { return by_rows ? as_rows(t, dim) : t.contiguous(); };
  const Tensor dy = arranged(grad.to(input.scalar_type())), x = arranged(input);
  const Tensor y = is_narrow(input) ? kept.contiguous() : arranged(kept);
  const Tensor dx_rows = by_rows && dx.defined() ? rows_for(dx, dim) : dx;
  const RowMask row_mask(mask, input, dim);
  cpu::SoftmaxBackwardArgs args{};
  args.dy = dy.const_data_ptr();
  args.x = x.const_data_ptr();
  args.y = is_narrow(input) ? nullptr : y.const_data_ptr();
  args.numbers = is_narrow(input) ? static_cast<const cpu::SoftmaxRowNumbers*>(y.const_data_ptr()) : nullptr;
  args.dx = dx.defined() ? dx_rows.data_ptr() : nullptr;
  args.mask = row_mask.description;
  args.scale = scale;
  args.dtype = cpu_dtype(input.scalar_type());
  if (by_rows) {
    args.n = input.size(dim);
    args.inner = 1;
    run_with_mask_gradient(args, dmask.movedim(dim, -1), x.sizes());
    if (dx.defined()) {
      from_rows(dx_rows, dx, dim);
    }
  } else if (dx.defined()) {
    Pieces(x, dim).run(args, &cpu::softmax_backward);
  }
  return {dx, dmask};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_softmax_forward", forward);
  m.impl("_softmax_backward", backward);
}

}  // namespace allfinite::softmax_rows
