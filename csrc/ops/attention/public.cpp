// scaled_dot_product_attention: checks, shapes, the draw of the dropout seed, autocast, C++ functions. Every input is
// brought into the one form of the inner ops, [batch, heads, length, size] (autograd.cpp, cpu.cpp).
#include <ATen/ops/randint.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "allfinite/ops/attention.h"
#include "ops/attention/attention.h"
#include "ops/check.h"

namespace allfinite {
namespace attention {
namespace {

using SymShape = std::vector<c10::SymInt>;
using Window = at::OptionalIntArrayRef;

// --- checks --------------------------------------------------------------------------------------------------------

void check_tensors(const Tensor& query, const Tensor& key, const Tensor& value) {
  const std::pair<const char*, const Tensor&> named[] = {{"query", query}, {"key", key}, {"value", value}};
  for (const auto& [name, t] : named) {
    check::strided(kOp, name, t);
    check::floating(kOp, name, t);
    check::same_device(kOp, name, t, "query", query);
    TORCH_CHECK_TYPE(t.scalar_type() == query.scalar_type(), kOp, ": expected ", name, " of query's dtype, ",
                     query.scalar_type(), ", but got ", t.scalar_type());
    TORCH_CHECK_VALUE(t.dim() >= 2, kOp, ": expected ", name, " of shape (..., length, size), but got ", t.sym_sizes());
  }
  TORCH_CHECK_VALUE(query.sym_size(-1) == key.sym_size(-1), kOp,
                    ": expected query and key of one size in the last dimension, but got ", query.sym_sizes(), " and ",
                    key.sym_sizes());
  TORCH_CHECK_VALUE(key.sym_size(-2) == value.sym_size(-2), kOp, ": expected key and value of one length, but got ",
                    key.sym_sizes(), " and ", value.sym_sizes());
}

void check_mask(const Tensor& mask, const Tensor& query, bool is_causal) {
  check::strided(kOp, "attn_mask", mask);
  check::same_device(kOp, "attn_mask", mask, "query", query);
  if (mask.scalar_type() != at::kBool) {
    TORCH_CHECK_TYPE(at::isFloatingType(mask.scalar_type()), kOp,
                     ": expected attn_mask to be bool (True: takes part) or floating (added), but got ",
                     mask.scalar_type());
    check::floating(kOp, "attn_mask", mask);
  }
  TORCH_CHECK(!is_causal, kOp, ": expected attn_mask or is_causal, but got both");
}

Options check_options(double dropout_p, bool is_causal, std::optional<double> scale, double softcap,
                      const Window& window) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, kOp, ": expected dropout_p in [0, 1], but got ", dropout_p);
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), kOp, ": expected a finite scale, but got ", scale.value_or(0));
  check::non_negative(kOp, "softcap", softcap);
  Options options{dropout_p, scale, softcap, -1, is_causal ? 0 : -1};
  if (window) {
    TORCH_CHECK_VALUE(window->size() == 2 && (*window)[0] >= -1 && (*window)[1] >= -1, kOp,
                      ": expected window to be (left, right), each >= 0, or -1 for unbounded, but got ", *window);
    options.left = (*window)[0];
    options.right = is_causal ? 0 : (*window)[1];
  }
  return options;
}

// --- shapes --------------------------------------------------------------------------------------------------------

// `t` with ones put in front until it has `rank` dimensions.
Tensor with_rank(Tensor t, int64_t rank) {
  while (t.dim() < rank) {
    t = t.unsqueeze(0);
  }
  return t;
}

// Brings query, key, value and mask to [batch, heads, length, size], and a result back.
class Shapes {
 public:
  Shapes(const Tensor& query, const Tensor& key, const Tensor& value, bool enable_gqa)
      : rank_(std::max({query.dim(), key.dim(), value.dim()})), inner_rank_(std::max<int64_t>(rank_, 4)) {
    q_ = with_rank(query, inner_rank_);
    k_ = with_rank(key, inner_rank_);
    v_ = with_rank(value, inner_rank_);
    for (int64_t d = 0; d < inner_rank_ - 3; ++d) {
      batch_.push_back(common(d, {&q_, &k_, &v_}));
    }
    enable_gqa ? group_heads() : broadcast_heads();
  }

  Tensor query() const { return to_four(q_, heads_); }
  Tensor key() const { return to_four(k_, kv_heads_); }
  Tensor value() const { return to_four(v_, kv_heads_); }

  Tensor mask(const Tensor& given) const {
    const SymShape full = output_shape(inner_rank_, k_.sym_size(-2));
    bool fits = given.dim() <= rank_ || given.dim() <= 2;
    const Tensor mask = fits ? with_rank(given, inner_rank_) : given;
    bool batched = false;
    for (int64_t d = 0; fits && d < inner_rank_; ++d) {
      const bool one = mask.sym_size(d) == 1;
      fits = one || mask.sym_size(d) == full[d];
      batched |= !one && d < inner_rank_ - 3;
    }
    const SymShape expected = output_shape(rank_, k_.sym_size(-2));
    TORCH_CHECK_VALUE(fits, kOp, ": expected attn_mask to broadcast to ", c10::SymIntArrayRef(expected), ", but got ",
                      given.sym_sizes());
    if (inner_rank_ == 4 || !batched) {
      return mask.flatten(0, inner_rank_ - 4);
    }
    // Widened first, so that the gradient's sum over what is expanded here is in fp32 too.
    const bool narrow = mask.scalar_type() == at::kHalf || mask.scalar_type() == at::kBFloat16;
    SymShape expanded = mask.sym_sizes().vec();
    std::copy(batch_.begin(), batch_.end(), expanded.begin());
    return (narrow ? mask.to(at::kFloat) : mask).expand_symint(expanded).flatten(0, inner_rank_ - 4);
  }

  // `t` is [batch, heads, queries, *rest]
  Tensor output(const Tensor& t) const {
    if (rank_ == 4) {
      return t;
    }
    SymShape shape = output_shape(rank_, t.sym_size(-1));
    if (t.dim() == 3) {
      shape.pop_back();
    }
    return t.reshape_symint(shape);
  }

 private:
  // (..., heads, queries, last) of `rank` dimensions
  SymShape output_shape(int64_t rank, const c10::SymInt& last) const {
    SymShape shape = batch_;
    shape.insert(shape.end(), {heads_, q_.sym_size(-2), last});
    return SymShape(shape.end() - rank, shape.end());
  }

  c10::SymInt common(int64_t dim, std::initializer_list<const Tensor*> tensors) const {
    c10::SymInt size = 1;
    for (const Tensor* t : tensors) {
      if (size == 1) {
        size = t->sym_size(dim);
      }
      TORCH_CHECK_VALUE(t->sym_size(dim) == size || t->sym_size(dim) == 1, kOp,
                        ": expected query, key and value whose leading dimensions broadcast, but got ", q_.sym_sizes(),
                        ", ", k_.sym_sizes(), " and ", v_.sym_sizes());
    }
    return size;
  }

  void group_heads() {
    TORCH_CHECK_VALUE(rank_ >= 3, kOp, ": expected (..., heads, length, size) with enable_gqa, but got ",
                      q_.sym_sizes().slice(inner_rank_ - rank_));
    heads_ = q_.sym_size(-3);
    kv_heads_ = k_.sym_size(-3);
    TORCH_CHECK_VALUE(kv_heads_ == v_.sym_size(-3), kOp, ": expected key and value of one number of heads, but got ",
                      kv_heads_, " and ", v_.sym_size(-3));
    TORCH_CHECK_VALUE(kv_heads_ == heads_ || (kv_heads_ != 0 && heads_ % kv_heads_ == 0), kOp,
                      ": expected query heads to be a multiple of key heads, but got ", heads_, " and ", kv_heads_);
  }

  // One key head for all query heads stays one: its gradient is then summed inside.
  void broadcast_heads() {
    heads_ = common(inner_rank_ - 3, {&q_, &k_, &v_});
    kv_heads_ = common(inner_rank_ - 3, {&k_, &v_});
  }

  Tensor to_four(const Tensor& t, const c10::SymInt& heads) const {
    SymShape shape = batch_;
    shape.insert(shape.end(), {heads, t.sym_size(-2), t.sym_size(-1)});
    const Tensor full = t.sym_sizes() == c10::SymIntArrayRef(shape) ? t : t.expand_symint(shape);
    return full.flatten(0, inner_rank_ - 4);
  }

  int64_t rank_, inner_rank_;
  Tensor q_, k_, v_;
  SymShape batch_;
  c10::SymInt heads_ = 0, kv_heads_ = 0;
};

// --- the public ops ------------------------------------------------------------------------------------------------

OptionalTensor draw_seed(double dropout_p, const Tensor& query) {
  if (dropout_p == 0) {
    return std::nullopt;
  }
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, query.options().dtype(at::kLong));
}

std::tuple<Tensor, Tensor> attention_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const OptionalTensor& given_mask, double dropout_p, bool is_causal,
                                         std::optional<double> scale, bool enable_gqa, double softcap, Window window) {
  check_tensors(query, key, value);
  const OptionalTensor attn_mask = or_none(given_mask);
  const Options options = check_options(dropout_p, is_causal, scale, softcap, window);
  if (attn_mask) {
    check_mask(*attn_mask, query, is_causal);
  }
  const Shapes shapes(query, key, value, enable_gqa);
  const OptionalTensor mask = attn_mask ? OptionalTensor(shapes.mask(*attn_mask)) : std::nullopt;
  const auto [output, lse, stats] =
      call_forward(shapes.query(), shapes.key(), shapes.value(), mask, draw_seed(dropout_p, query), options);
  return {shapes.output(output), shapes.output(lse)};
}

Tensor attention_output(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                        double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, double softcap,
                        Window window) {
  return std::get<0>(
      attention_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, window));
}

template <class Result>
auto find_public(const char* name) {
  return find_op<Result(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double, bool,
                        std::optional<double>, bool, double, Window)>(name);
}
const auto& output_op() {
  static const auto op = find_public<Tensor>("allfinite::scaled_dot_product_attention");
  return op;
}
const auto& lse_op() {
  static const auto op = find_public<std::tuple<Tensor, Tensor>>("allfinite::scaled_dot_product_attention_lse");
  return op;
}

// --- autocast ------------------------------------------------------------------------------------------------------
// Query, key and value go to the autocast dtype. The mask stays as it is: it is added in fp32 whatever its dtype.

template <c10::DeviceType device>
Tensor output_autocast(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
                       double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, double softcap,
                       Window window) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  return output_op().call(autocast<device>(query), autocast<device>(key), autocast<device>(value), attn_mask, dropout_p,
                          is_causal, scale, enable_gqa, softcap, window);
}

template <c10::DeviceType device>
std::tuple<Tensor, Tensor> lse_autocast(const Tensor& query, const Tensor& key, const Tensor& value,
                                        const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa, double softcap, Window window) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  return lse_op().call(autocast<device>(query), autocast<device>(key), autocast<device>(value), attn_mask, dropout_p,
                       is_causal, scale, enable_gqa, softcap, window);
}

}  // namespace

TORCH_LIBRARY_IMPL(allfinite, CompositeImplicitAutograd, m) {
  m.impl("scaled_dot_product_attention", attention_output);
  m.impl("scaled_dot_product_attention_lse", attention_lse);
}
// Under vmap too the seed is drawn by torch's op, which keeps to vmap's `randomness`.
TORCH_LIBRARY_IMPL(allfinite, FuncTorchBatchedDecomposition, m) {
  m.impl("scaled_dot_product_attention", attention_output);
  m.impl("scaled_dot_product_attention_lse", attention_lse);
}
TORCH_LIBRARY_IMPL(allfinite, AutocastCPU, m) {
  m.impl("scaled_dot_product_attention", output_autocast<c10::DeviceType::CPU>);
  m.impl("scaled_dot_product_attention_lse", lse_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(allfinite, AutocastCUDA, m) {
  m.impl("scaled_dot_product_attention", output_autocast<c10::DeviceType::CUDA>);
  m.impl("scaled_dot_product_attention_lse", lse_autocast<c10::DeviceType::CUDA>);
}

}  // namespace attention

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa, double softcap,
                                    at::OptionalIntArrayRef window) {
  return attention::output_op().call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap,
                                     window);
}

std::tuple<Tensor, Tensor> scaled_dot_product_attention_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                                            const OptionalTensor& attn_mask, double dropout_p,
                                                            bool is_causal, std::optional<double> scale,
                                                            bool enable_gqa, double softcap,
                                                            at::OptionalIntArrayRef window) {
  return attention::lse_op().call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap,
                                  window);
}

}  // namespace allfinite
