// cross_entropy: checks, composite, autocast, C++ function. Every input is checked here, before anything is allocated;
// only the values of class indices are checked by the inner op, which has them. Autograd and meta kernels:
// cross_entropy_autograd.cpp; CPU kernels: cross_entropy_cpu.cpp.
#include "ops/cross_entropy.h"

#include <torch/library.h>

#include "allfinite/ops/losses.h"
#include "ops/check.h"

namespace allfinite {
namespace {

using namespace cross_entropy_parts;

using Public = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, c10::string_view, double, double);

// --- check ---------------------------------------------------------------------------------------------------------

int64_t reduction_number(c10::string_view name) {
  TORCH_CHECK_VALUE(name == "none" || name == "mean" || name == "sum", kOp,
                    ": expected reduction to be none, mean or sum, but got ", name);
  return name == "none" ? kNone : name == "mean" ? kMean : kSum;
}

void check_probabilities(const Tensor& target, int64_t ignore_index) {
  TORCH_CHECK_TYPE(at::isFloatingType(target.scalar_type()), kOp, ": expected a target of input's shape to hold class ",
                   "probabilities in a floating dtype, but got ", target.scalar_type());
  check::floating(kOp, "target", target);
  TORCH_CHECK_VALUE(ignore_index < 0, kOp, ": expected no ignore_index beside class probabilities, but got ",
                    ignore_index);
}

void check_indices(const Tensor& input, const Tensor& target) {
  const auto shape = rows_shape(input);
  const bool one_of_one = input.dim() == 1 && target.dim() == 1 && target.sym_size(0) == 1;
  TORCH_CHECK_VALUE(one_of_one || target.sym_sizes() == c10::SymIntArrayRef(shape), kOp, ": expected target of shape ",
                    c10::SymIntArrayRef(shape), " (class indices) or ", input.sym_sizes(),
                    " (class probabilities), but got ", target.sym_sizes());
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong || target.scalar_type() == at::kByte, kOp,
                   ": expected class indices in int64 or uint8, but got ", target.scalar_type());
}

void check_weight(const OptionalTensor& weight, const Tensor& input) {
  if (!weight) {
    return;
  }
  check::strided(kOp, "weight", *weight);
  check::same_device(kOp, "weight", *weight, "input", input);
  const auto classes = input.sym_size(class_dim(input));
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == classes, kOp, ": expected weight of shape [", classes,
                    "], but got ", weight->sym_sizes());
  const auto dtype = weight->scalar_type();
  TORCH_CHECK_TYPE(dtype == input.scalar_type() || (dtype == at::kFloat && input.scalar_type() != at::kDouble), kOp,
                   ": expected weight of input's dtype, ", input.scalar_type(),
                   ", or float32 beside a 16-bit input, but got ", dtype);
}

void check_arguments(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     double label_smoothing, double z_loss) {
  check::floating(kOp, "input", input);
  check::strided(kOp, "input", input);
  check::strided(kOp, "target", target);
  check::same_device(kOp, "target", target, "input", input);
  TORCH_CHECK_VALUE(input.dim() >= 1, kOp, ": expected input of shape (C), (N, C) or (N, C, d1, ...), but got []");
  if (has_probabilities(input, target)) {
    check_probabilities(target, ignore_index);
  } else {
    check_indices(input, target);
  }
  check_weight(weight, input);
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, kOp, ": expected label_smoothing in [0, 1], but got ",
                    label_smoothing);
  check::non_negative(kOp, "z_loss", z_loss);
}

// --- composite -----------------------------------------------------------------------------------------------------

Tensor composite(const Tensor& input, const Tensor& target, const OptionalTensor& given_weight, int64_t ignore_index,
                 c10::string_view reduction, double label_smoothing, double z_loss) {
  const OptionalTensor weight = or_none(given_weight);
  check_arguments(input, target, weight, ignore_index, label_smoothing, z_loss);
  static const auto op = find_op<Forward>("allfinite::_cross_entropy_forward");
  return std::get<0>(
      op.call(input, target, weight, ignore_index, reduction_number(reduction), label_smoothing, z_loss));
}

// --- autocast ------------------------------------------------------------------------------------------------------
// The loss is fp32 whatever the logits are, and they stay as they are: their gradient is then rounded once, by the
// kernel. A 16-bit weight is widened, so that it fits logits of any dtype, as under torch's autocast to fp32.

const auto& public_op() {
  static const auto op = find_op<Public>(kOp);
  return op;
}

template <c10::DeviceType device>
Tensor autocast_call(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     c10::string_view reduction, double label_smoothing, double z_loss) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  OptionalTensor wide = or_none(weight);
  if (wide && (wide->scalar_type() == at::kHalf || wide->scalar_type() == at::kBFloat16)) {
    wide = wide->to(at::kFloat);
  }
  return public_op().call(input, target, wide, ignore_index, reduction, label_smoothing, z_loss);
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", composite);
}
TORCH_LIBRARY_IMPL(allfinite, AutocastCPU, m) {
  m.impl("cross_entropy", autocast_call<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(allfinite, AutocastCUDA, m) {
  m.impl("cross_entropy", autocast_call<c10::DeviceType::CUDA>);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     std::string_view reduction, double label_smoothing, double z_loss) {
  return public_op().call(input, target, weight, ignore_index, reduction, label_smoothing, z_loss);
}

}  // namespace allfinite
