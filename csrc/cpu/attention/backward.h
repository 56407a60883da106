// What the backward kernels share: the weights of a tile, made again from the saved row statistics, and the gradient of
// the scores, dS = P (dP - delta) with delta = sum of P dP - grad_lse, one tile of rows against one tile of keys.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class BackwardTile {
 public:
  // buffer: attention_backward_scratch; what follows this object's part begins at `rest`.
  BackwardTile(const AttentionProblem& problem, const void* stats, const void* delta, A* buffer)
      : scores_(problem),
        p_(problem),
        stats_(static_cast<const A*>(stats)),
        delta_(static_cast<const A*>(delta)),
        weights_(buffer),
        gradients_(weights_ + kMatrix),
        slopes_(gradients_ + kMatrix),
        dropout_(slopes_ + kMatrix),
        rest_(dropout_ + 2 * kAttentionKeys) {}

  const Scores<A>& scores() const { return scores_; }
  A* rest() const { return rest_; }
  // P of the last tile, [row][key]; a masked weight is -0.
  A* weights(int64_t r = 0) const { return weights_ + r * kAttentionKeys; }
  // The gradient of its scores; a masked one is 0, whatever dP and delta are.
  A* gradients(int64_t r = 0) const { return gradients_ + r * kAttentionKeys; }

  // The row's gradients are in a unit of 2^this times that of its dP.
  int more_exponent(const RowTile& t, int64_t r) const {
    return static_cast<int>(delta_[(scores_.query_slice(t) * p_.queries + t.row + r) * kAttentionDelta + 2]);
  }

  void compute(const RowTile& t, int64_t tile, const Band& band) {
    scores_.dot(p_.query, p_.key, t, tile, band, weights_, kAttentionKeys);
    scores_.dot(p_.grad, p_.value, t, tile, band, gradients_, kAttentionKeys);
    const int64_t keys = scores_.keys_in(tile), first = scores_.query_slice(t) * p_.queries + t.row;
    const bool simple = scores_.simple(t) && !Scores<A>::has(p_.value, scores_.key_slice(t), kAttentionNonFinite) &&
                        !Scores<A>::has(p_.grad, scores_.query_slice(t), kAttentionNonFinite);
    for (int64_t r = 0; r < t.rows; ++r) {
      const Span span = scores_.span(band, r, keys);
      const A* stats = stats_ + (first + r) * (kAttentionStats + p_.value_depth);
      const A* delta = delta_ + (first + r) * kAttentionDelta;
      const A inverse = __builtin_fabs(stats[1]);
      if (delta[2] != 0) {
        times_power(r, span, -static_cast<int>(delta[2]));
      }
      if (p_.dropout_p > 0) {
        scores_.drop(t, r, tile, span, gradients(r), dropout_);
      }
      if (simple && (delta[0] + inverse) * A(0) == 0) {
        simple_row(t, tile, r, span, stats[0], inverse, delta[0]);
      } else {
        scores_.row_scores(t, tile, r, span, weights(r), slope(r), dropout_);
        if (scores_.may_mask(span)) {
          row_gradients<true>(r, span, stats[0], inverse, delta[0]);
        } else {
          row_gradients<false>(r, span, stats[0], inverse, delta[0]);
        }
      }
      if (stats[1] < 0) {
        only_key(r, span, delta[1]);
      }
    }
    clear_padding(t.rows, keys);
  }

  // P to what dropout leaves of it, and the gradients from the scores to the dot products: times the slope of the
  // softcap, which a masked gradient of 0 survives.
  void to_products(const RowTile& t, int64_t tile, const Band& band) {
    const int64_t keys = scores_.keys_in(tile);
    for (int64_t r = 0; (p_.softcap > 0 || p_.dropout_p > 0) && r < t.rows; ++r) {
      const Span span = scores_.span(band, r, keys);
      for (int64_t j = span.begin; p_.softcap > 0 && j < span.end; j += kWidth<A>) {
        const Vec<A> ds = load<A>(gradients(r) + j) * load<A>(slope(r) + j);
        store(gradients(r) + j, is_masked<A>(load<A>(weights(r) + j)) ? Vec<A>{} : ds);
      }
      if (p_.dropout_p > 0) {
        scores_.drop(t, r, tile, span, weights(r), dropout_);
      }
    }
  }

 private:
  static constexpr int64_t kMatrix = (kAttentionRows + 1) * kAttentionKeys;

  A* slope(int64_t r) const { return slopes_ + r * kAttentionKeys; }

  // What a whole block of keys reads beyond the keys: of each row, and of the row behind the last.
  void clear_padding(int64_t rows, int64_t keys) const {
    const int64_t end = smaller(round_up(keys, kBlockRows), kAttentionKeys);
    for (int64_t r = 0; r < rows; ++r) {
      fill(weights(r), round_up(keys, kWidth<A>), end, A(0));
      fill(gradients(r), round_up(keys, kWidth<A>), end, A(0));
    }
    fill(weights(rows), 0, kBlockRows, A(0));
    fill(gradients(rows), 0, kBlockRows, A(0));
  }

  // dP from the unit that its products have to the row's.
  void times_power(int64_t r, const Span& span, int exponent) const {
    const A first = power_of_two<A>(exponent / 2), second = power_of_two<A>(exponent - exponent / 2);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      store(gradients(r) + j, load<A>(gradients(r) + j) * first * second);
    }
  }

  // Where all is finite: a masked weight of 0 leaves a gradient of 0. (Where the window cuts, dP may not be computed.)
  ALLFINITE_INLINE void simple_row(const RowTile& t, int64_t tile, int64_t r, const Span& span, A largest, A inverse,
                                   A delta) const {
    A* weights = this->weights(r);
    A* gradients = this->gradients(r);
    const A top = largest == Scores<A>::kMasked ? A(0) : largest;
    const bool cut = span.cut();
    scores_.each_score(t, tile, r, span, weights, [&](int64_t j, Vec<A> score) {
      const Vec<A> p = Scores<A>::template weight<false>(score, top, inverse);
      const Vec<A> ds = p * (load<A>(gradients + j) - delta);
      store(weights + j, p);
      store(gradients + j, cut ? lanes_within(ds, span.first - j, span.last - j, A(0)) : ds);
    });
  }

  template <bool kMayMask>
  ALLFINITE_INLINE void row_gradients(int64_t r, const Span& span, A largest, A inverse, A delta) const {
    A* weights = this->weights(r);
    A* gradients = this->gradients(r);
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      const Vec<A> p = Scores<A>::template weight<kMayMask>(load<A>(weights + j), largest, inverse);
      const Vec<A> ds = p * (load<A>(gradients + j) - delta);
      store(weights + j, p);
      store(gradients + j, kMayMask ? (is_masked<A>(p) ? Vec<A>{} : ds) : ds);
    }
  }

  // Where one key alone has weight, its dP - delta is the gradient of lse exactly, not the rounding of two sums
  // (nothing at all where lse has no gradient).
  void only_key(int64_t r, const Span& span, A grad_lse) const {
    for (int64_t j = span.begin; j < span.end; j += kWidth<A>) {
      const Vec<A> ds = load<A>(gradients(r) + j);
      const auto only = load<A>(weights(r) + j) == A(1) && ds == ds;
      store(gradients(r) + j, only ? splat(grad_lse) : ds);
    }
  }

  Scores<A> scores_;
  const AttentionProblem& p_;
  const A *stats_, *delta_;
  A *weights_, *gradients_, *slopes_, *dropout_, *rest_;
};

// The scale as a fraction in [0.5, 1) and a power of two, so that it enters a gradient with one rounding.
template <class A>
struct Scale {
  explicit Scale(double scale) { fraction = static_cast<A>(__builtin_frexp(scale, &exponent)); }
  A fraction;
  int exponent = 0;
};

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
