// What every op file shares: calling an op through the dispatcher, and autocast for both device keys.
#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>

namespace allfinite {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Tensor or_undefined(const OptionalTensor& t) {
  return t.value_or(Tensor());
}
inline OptionalTensor or_none(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}
// In C++ an undefined tensor stands for an absent one as well.
inline OptionalTensor or_none(const OptionalTensor& t) {
  return t && t->defined() ? t : std::nullopt;
}

// A typed handle to `allfinite::<name>`; keep it in a function-local static.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// One rule for the CPU and the CUDA key, so that the two cannot drift: fp16, bf16 and fp32 are cast to the
// active autocast dtype, fp64 and integers are left as they are.
template <c10::DeviceType device>
Tensor autocast(const Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}

template <c10::DeviceType device>
constexpr c10::DispatchKey autocast_key() {
  return device == c10::DeviceType::CUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
}

}  // namespace allfinite
