// What the two backward passes share: the weights of a tile, made again from the saved row statistics, and the gradient
// of the scores, dS = P (dP - delta) with delta = sum of P dP - grad_lse.
#pragma once
#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

// One tile of query rows against one tile of keys; the three matrices have the same layout.
template <class A>
struct Tile {
  A* weights;    // P, then, with dropout in, what of it was kept
  A* gradients;  // dP of the weights before dropout, then dS
  A* slopes;     // d score / d dot product, with softcap only
  int64_t row_step;
};

template <class A>
class BackwardTiles {
 public:
  BackwardTiles(const AttentionProblem& problem, const void* stats, A* buffer)
      : scores_(problem), p_(problem), stats_(static_cast<const A*>(stats)), buffer_(buffer) {}

  const Scores<A>& scores() const { return scores_; }

  // weights = P, gradients = dP. A masked weight is -0.
  void weights_and_gradients(const RowTile& t, int64_t tile, const Tile<A>& out) const {
    scores_(t, tile, out.weights, p_.softcap > 0 ? out.slopes : nullptr, out.row_step, buffer_);
    const A* stats = stats_ + (scores_.query_slice(t) * p_.queries + t.row) * kAttentionStats;
    for (int64_t r = 0; r < t.rows; ++r) {
      Scores<A>::weigh(out.weights + r * out.row_step, scores_.columns_in(tile), stats[r * kAttentionStats],
                       stats[r * kAttentionStats + 1]);
    }
    scores_.dot(p_.grad, p_.value, t, tile, out.gradients, out.row_step);
    for (int64_t r = 0; p_.dropout_p > 0 && r < t.rows; ++r) {
      scores_.drop(t, r, tile, out.gradients + r * out.row_step, buffer_);
    }
  }

  // The gradient of one row's scores, in place of dP; a masked one is 0, whatever dP and delta are.
  static void score_gradients(const A* weights, A* gradients, int64_t columns, A delta) {
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      const Vec<A> p = load<A>(weights + j);
      const Vec<A> ds = p * (load<A>(gradients + j) - delta);
      store(gradients + j, is_masked<A>(p) ? Vec<A>{} : ds);
    }
  }

  // From the scores to the dot products: times the slope of the softcap, which a masked gradient of 0 survives.
  static void through_softcap(const A* weights, A* gradients, const A* slopes, int64_t columns) {
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      const Vec<A> ds = load<A>(gradients + j) * load<A>(slopes + j);
      store(gradients + j, is_masked<A>(load<A>(weights + j)) ? Vec<A>{} : ds);
    }
  }

 private:
  Scores<A> scores_;
  const AttentionProblem& p_;
  const A* stats_;
  A* buffer_;
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
