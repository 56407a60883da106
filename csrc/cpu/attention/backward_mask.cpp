// Attention backward: the gradient of an additive mask, which is dS, summed where the mask is broadcast.
//
// Work: Sq Sk (D + Dv) multiply-adds, for P and dP once more; only where this gradient is asked for. Sums: double.
//
// Each task owns what it writes; a sum over a broadcast dimension is one task that goes through it in order (F5).
#include "cpu/attention/attention.h"
#include "cpu/attention/backward.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class MaskGrad {
 public:
  explicit MaskGrad(const AttentionMaskGradArgs& args)
      : args_(args),
        p_(args.problem),
        tile_(args.problem, args.stats, args.delta, static_cast<A*>(args.scratch)),
        sum_rows_(args.mask_size[2] == 1 ? 1 : kAttentionRows),
        sum_keys_(args.mask_size[3]) {}

  void task(int64_t index) {
    const int64_t batch = index / (args_.tasks[1] * args_.tasks[2]), head = index / args_.tasks[2] % args_.tasks[1];
    const int64_t tile = index % args_.tasks[2], all_tiles = round_up(p_.queries, kAttentionRows) / kAttentionRows;
    const auto range = [](int64_t mine, int64_t tasks, int64_t all) {
      return tasks == all ? KeyRange{mine, mine + 1} : KeyRange{0, all};
    };
    const KeyRange batches = range(batch, args_.tasks[0], p_.batch), heads = range(head, args_.tasks[1], p_.heads),
                   row_tiles = range(tile, args_.tasks[2], all_tiles);
    for (int64_t i = 0; i < sum_rows_ * sum_keys_; ++i) {
      args_.sums[i] = 0;
    }
    for (int64_t b = batches.begin; b < batches.end; ++b) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t i = row_tiles.begin; i < row_tiles.end; ++i) {
          const int64_t row = i * kAttentionRows;
          rows({b, h, row, smaller(kAttentionRows, p_.queries - row)});
        }
      }
    }
    write(batches.begin, heads.begin, row_tiles.begin * kAttentionRows);
  }

 private:
  const Scores<A>& scores() const { return tile_.scores(); }

  void rows(const RowTile& t) {
    const KeyRange range = scores().tiles(t);
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      const Band band = scores().band(t, tile);
      tile_.compute(t, tile, band);
      for (int64_t r = 0; r < t.rows; ++r) {
        add_row(t, tile, r, scores().span(band, r, scores().keys_in(tile)));
      }
    }
  }

  void add_row(const RowTile& t, int64_t tile, int64_t r, const Span& span) const {
    double* sums = args_.sums + (sum_rows_ == 1 ? 0 : r * sum_keys_);
    const int exponent = p_.grad.exponents[scores().packed_row(p_.grad, t) + r] +
                         p_.value.exponents[scores().packed_key(p_.value, t)] + tile_.more_exponent(t, r);
    const Factor<double> factor(1.0, exponent);
    const A* gradients = tile_.gradients(r);
    const int64_t first = tile * kAttentionKeys;
    for (int64_t j = span.first; j < span.last; ++j) {
      sums[sum_keys_ == 1 ? 0 : first + j] += static_cast<double>(gradients[j]) * factor.first * factor.second;
    }
  }

  void write(int64_t batch, int64_t head, int64_t row) const {
    const int64_t* size = args_.mask_size;
    const int64_t b = size[0] == 1 ? 0 : batch, h = size[1] == 1 ? 0 : head, i = size[2] == 1 ? 0 : row;
    const int64_t offset = ((b * size[1] + h) * size[2] + i) * size[3];
    const int64_t count = smaller(sum_rows_, size[2] - i) * size[3];
    visit_dtype(p_.mask_dtype, [&](auto type) {
      using M = typename decltype(type)::type;
      M* out = static_cast<M*>(args_.grad_mask) + offset;
      for (int64_t k = 0; k < count; ++k) {
        out[k] = narrow<M>(args_.sums[k]);
      }
    });
  }

  const AttentionMaskGradArgs& args_;
  const AttentionProblem& p_;
  BackwardTile<A> tile_;
  int64_t sum_rows_, sum_keys_;
};

}  // namespace

void attention_mask_grad(const AttentionMaskGradArgs& args) {
  const auto run = [&](auto a) {
    MaskGrad<typename decltype(a)::type> grad(args);
    for (int64_t task = args.begin; task < args.end; ++task) {
      grad.task(task);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
