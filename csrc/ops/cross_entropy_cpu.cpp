// cross_entropy: CPU kernels of the inner ops.
//
// Rows of classes are read where they lie if their classes do so side by side, rows a fixed step apart; of any other
// layout a copy is made. Rows are independent; their losses are added in double, in order (F5).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "cpu/cross_entropy.h"
#include "ops/cpu_dtype.h"
#include "ops/cross_entropy.h"

namespace allfinite {
namespace {

using namespace cross_entropy_parts;

// (N, C, d1, ...) as [rows, C].
Tensor as_rows(const Tensor& t) {
  const int64_t dim = class_dim(t);
  const Tensor last = t.movedim(dim, -1);
  const int64_t rows = c10::multiply_integers(last.sizes().slice(0, last.dim() - 1));
  const Tensor matrix = last.reshape({rows, t.size(dim)});
  return matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

// The inputs as the kernels take them, with what keeps their memory alive.
class Rows {
 public:
  Rows(const Tensor& input, const Tensor& target, const OptionalTensor& weight, const Options& o)
      : x_(as_rows(input)), compute_(compute_dtype(input)) {
    args.n = x_.size(1);
    count = x_.size(0);
    args.x = x_.const_data_ptr();
    args.x_stride = x_.stride(0);
    args.dtype = args.probability_dtype = cpu_dtype(input.scalar_type());
    args.weight_sum = static_cast<double>(args.n);
    args.smoothing = o.label_smoothing;
    args.z_loss = o.z_loss;
    args.ignore_index = o.ignore_index;
    if (weight) {
      weight_ = weight->to(compute_).contiguous();
      args.weight = weight_.const_data_ptr();
      args.weight_sum = weight_.sum(at::kDouble).item<double>();
    }
    if (has_probabilities(input, target)) {
      const Tensor p = as_rows(target);
      target_ = p.scalar_type() == input.scalar_type() ? p : p.to(compute_);
      args.probability = target_.const_data_ptr();
      args.probability_dtype = cpu_dtype(target_.scalar_type());
      args.probability_stride = target_.stride(0);
    } else {
      target_ = target.to(at::kLong).contiguous();
      args.target = target_.const_data_ptr<int64_t>();
      check_classes();
    }
  }

  // What the mean divides by.
  double denominator() const {
    if (!args.target) {
      return args.n == 0 ? 0 : static_cast<double>(count);  // of no classes: NaN, as torch
    }
    double sum = 0;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t t = args.target[row];
      sum += t == args.ignore_index ? 0 : class_weight(t);
    }
    return sum;
  }

  at::ScalarType probability_dtype() const { return target_.scalar_type(); }

  // f(begin, end) in parallel; at least 32 K elements to a thread, as torch's own grain size.
  template <class F>
  void for_rows(const F& f) const {
    at::parallel_for(0, count, std::max<int64_t>(1, 32768 / std::max<int64_t>(args.n, 1)), f);
  }

  cpu::CrossEntropyRows args{};
  int64_t count = 0;

 private:
  void check_classes() const {
    for (int64_t row = 0; row < count; ++row) {
      const int64_t t = args.target[row];
      TORCH_CHECK_INDEX((t >= 0 && t < args.n) || t == args.ignore_index, kOp, ": expected classes in [0, ", args.n,
                        ") or ignore_index ", args.ignore_index, ", but got ", t, " at row ", row);
    }
  }
  double class_weight(int64_t target) const {
    if (!args.weight) {
      return 1;
    }
    return compute_ == at::kDouble ? weight_.const_data_ptr<double>()[target]
                                   : static_cast<double>(weight_.const_data_ptr<float>()[target]);
  }

  Tensor x_, target_, weight_;
  at::ScalarType compute_;
};

std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                                               int64_t ignore_index, int64_t reduction, double label_smoothing,
                                               double z_loss) {
  const Rows rows(input, target, weight, {ignore_index, reduction, label_smoothing, z_loss});
  auto [loss, stats, denominator] = empty_forward(input, reduction);
  const Tensor row_loss = at::empty({rows.count}, at::kDouble);
  if (rows.args.n == 0) {
    row_loss.zero_();
    stats.zero_();
  } else {
    rows.for_rows([&](int64_t begin, int64_t end) {
      cpu::CrossEntropyForwardArgs part{rows.args, row_loss.data_ptr<double>()};
      part.rows.stats = stats.data_ptr();
      part.rows.begin = begin;
      part.rows.end = end;
      cpu::cross_entropy_forward(part);
    });
  }
  const double divisor = reduction == kMean ? rows.denominator() : 1;
  denominator.fill_(divisor);
  if (reduction == kNone) {
    loss.copy_(row_loss.view(loss.sizes()));
  } else {
    const double* losses = row_loss.const_data_ptr<double>();
    double sum = 0;
    for (int64_t row = 0; row < rows.count; ++row) {
      sum += losses[row];
    }
    // Not fill_, which refuses a number beyond fp32: such a loss is infinite.
    loss.copy_(at::scalar_tensor(divisor == 1 ? sum : sum / divisor, at::kDouble));
  }
  return {loss, stats, denominator};
}

std::tuple<Tensor, Tensor> backward_cpu(const Tensor& grad, const Tensor& input, const Tensor& target,
                                        const OptionalTensor& weight, const Tensor& stats, const Tensor& denominator,
                                        int64_t ignore_index, int64_t reduction, double label_smoothing, double z_loss,
                                        std::array<bool, 2> output_mask) {
  const Rows rows(input, target, weight, {ignore_index, reduction, label_smoothing, z_loss});
  auto [dx, dtarget] = empty_backward(input, target, output_mask);
  if (input.numel() == 0 || (!dx.defined() && !dtarget.defined())) {
    return {dx, dtarget};
  }
  const Tensor dy = grad.to(compute_dtype(input)).contiguous(), saved = stats.contiguous();
  // In the dtype that the kernel reads the target in; another dtype is converted afterwards.
  Tensor dprobability = dtarget;
  if (dtarget.defined() && dtarget.scalar_type() != rows.probability_dtype()) {
    dprobability = at::empty_like(dtarget, dtarget.options().dtype(rows.probability_dtype()));
  }
  cpu::CrossEntropyBackwardArgs args{};
  args.rows = rows.args;
  args.rows.stats = const_cast<void*>(saved.const_data_ptr());
  args.grad = dy.const_data_ptr();
  args.grad_stride = reduction == kNone ? 1 : 0;
  args.denominator = denominator.item<double>();
  args.dx = dx.defined() ? dx.data_ptr() : nullptr;
  args.dprobability = dprobability.defined() ? dprobability.data_ptr() : nullptr;
  rows.for_rows([&](int64_t begin, int64_t end) {
    auto part = args;
    part.rows.begin = begin;
    part.rows.end = end;
    cpu::cross_entropy_backward(part);
  });
  if (dtarget.defined() && !dtarget.is_same(dprobability)) {
    dtarget.copy_(dprobability);
  }
  return {dx, dtarget};
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CPU, m) {
  m.impl("_cross_entropy_forward", forward_cpu);
  m.impl("_cross_entropy_backward", backward_cpu);
}

}  // namespace allfinite
