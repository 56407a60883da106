// Attention backward, by query rows: delta = sum of P dP - grad_lse for each row, dQ = scale dS K, and the gradient of
// an additive mask, which is dS, summed where the mask is broadcast.
//
// Work: Sq Sk (2 D + Dv) multiply-adds. P and dP of a tile of rows are kept for all its keys (8 bytes a pair), so that
// delta needs no second pass over the products; it never comes from the rounded output, and is exactly dP where one key
// takes part (dS = 0). Sums: fp32 (fp64) in a tile of keys, delta in double across tiles, the mask's gradient in
// double.
//
// Each task owns what it writes; a sum over a broadcast dimension is one task that goes through it in order (F5). dO of
// a row is in its own power of two, taken back at the end (F4).
#include "cpu/attention/attention.h"
#include "cpu/attention/backward.h"

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

template <class A>
class BackwardRows {
 public:
  explicit BackwardRows(const AttentionRowsArgs& args)
      : args_(args),
        p_(args.problem),
        columns_(p_.key.padded_columns),
        scale_(p_.scale),
        buffer_(static_cast<A*>(args.scratch)),
        tiles_(args.problem, args.stats, buffer_) {
    const int64_t matrix = args.tile_rows * args.span;
    key_row_ = buffer_ + 2 * kAttentionKeys;
    sums_ = key_row_ + columns_;
    all_ = {sums_ + args.tile_rows * columns_, nullptr, nullptr, args.span};
    all_.gradients = all_.weights + matrix;
    all_.slopes = all_.gradients + matrix;
  }

  void task(int64_t index) {
    const int64_t batch = index / (args_.tasks[1] * args_.tasks[2]), head = index / args_.tasks[2] % args_.tasks[1];
    const int64_t tile = index % args_.tasks[2], all_tiles = round_up(p_.queries, args_.tile_rows) / args_.tile_rows;
    const auto range = [](int64_t mine, int64_t tasks, int64_t all) {
      return tasks == all ? KeyRange{mine, mine + 1} : KeyRange{0, all};
    };
    const KeyRange batches = range(batch, args_.tasks[0], p_.batch), heads = range(head, args_.tasks[1], p_.heads),
                   row_tiles = range(tile, args_.tasks[2], all_tiles);
    clear_mask_sums();
    for (int64_t b = batches.begin; b < batches.end; ++b) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        for (int64_t i = row_tiles.begin; i < row_tiles.end; ++i) {
          const int64_t row = i * args_.tile_rows;
          rows({b, h, row, smaller(args_.tile_rows, p_.queries - row)});
        }
      }
    }
    write_mask(batches.begin, heads.begin, row_tiles.begin * args_.tile_rows);
  }

 private:
  const Scores<A>& scores() const { return tiles_.scores(); }

  Tile<A> at(int64_t tile) const {
    const int64_t offset = tile * kAttentionKeys;
    return {all_.weights + offset, all_.gradients + offset, all_.slopes + offset, all_.row_step};
  }

  void rows(const RowTile& t) {
    const KeyRange range = scores().tiles(t);
    double delta[kAttentionRows] = {};
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      const Tile<A> part = at(tile);
      tiles_.weights_and_gradients(t, tile, part);
      for (int64_t r = 0; r < t.rows; ++r) {
        delta[r] += weighted_sum(part, r, scores().columns_in(tile));
      }
    }
    A* saved = static_cast<A*>(args_.delta) + scores().query_slice(t) * p_.queries + t.row;
    for (int64_t r = 0; r < t.rows; ++r) {
      saved[r] = static_cast<A>(delta[r] - grad_lse(t, r));
    }
    for (int64_t i = 0; i < t.rows * columns_; ++i) {
      sums_[i] = 0;
    }
    for (int64_t tile = range.begin; tile < range.end; ++tile) {
      gradients(t, tile, saved);
    }
    for (int64_t r = 0; args_.grad_query && r < t.rows; ++r) {
      write_query(t, r);
    }
  }

  // Sum of P dP over the keys that take part.
  static double weighted_sum(const Tile<A>& part, int64_t r, int64_t columns) {
    Vec<A> sum = {};
    for (int64_t j = 0; j < columns; j += kWidth<A>) {
      const Vec<A> p = load<A>(part.weights + r * part.row_step + j);
      const Vec<A> product = p * load<A>(part.gradients + r * part.row_step + j);
      sum += is_masked<A>(p) ? Vec<A>{} : product;
    }
    return static_cast<double>(sum_lanes<A>(sum));
  }

  // In the units of the row's dP.
  double grad_lse(const RowTile& t, int64_t r) const {
    if (!args_.grad_lse) {
      return 0;
    }
    const double grad =
        static_cast<double>(static_cast<const A*>(args_.grad_lse)[scores().query_slice(t) * p_.queries + t.row + r]);
    return __builtin_ldexp(grad, -gradient_exponent(t, r));
  }

  // dP of the row is stored times 2^-this.
  int gradient_exponent(const RowTile& t, int64_t r) const {
    return p_.grad.exponents[scores().query_slice(t) * p_.grad.padded_rows + t.row + r] +
           p_.value.exponents[scores().key_slice(t)];
  }

  void gradients(const RowTile& t, int64_t tile, const A* delta) {
    const Tile<A> part = at(tile);
    const int64_t columns = scores().columns_in(tile);
    for (int64_t r = 0; r < t.rows; ++r) {
      const int64_t offset = r * part.row_step;
      tiles_.score_gradients(part.weights + offset, part.gradients + offset, columns, delta[r]);
      if (args_.grad_mask) {
        add_to_mask(t, r, tile, part.gradients + offset);
      }
      if (p_.softcap > 0) {
        tiles_.through_softcap(part.weights + offset, part.gradients + offset, part.slopes + offset, columns);
      }
    }
    if (args_.grad_query) {
      add_keys(t, tile, part);
    }
  }

  void add_keys(const RowTile& t, int64_t tile, const Tile<A>& part) {
    const int64_t first = scores().key_slice(t) * p_.key.padded_rows + tile * kAttentionKeys;
    Product<A> product{};
    product.a = part.gradients;
    product.a_row = part.row_step;
    product.a_k = 1;
    product.b = static_cast<const A*>(p_.key.row_major) + first * columns_;
    product.b_row = columns_;
    product.c = sums_;
    product.c_row = columns_;
    product.rows = t.rows;
    product.depth = scores().keys_in(tile);
    product.columns = round_up(p_.depth, kWidth<A>);
    multiply<Into::kAdd>(product);
    add_non_finite(p_.key.non_finite + first, product.depth, part.gradients, part.weights, part.row_step, 1, t.rows,
                   sums_, columns_, p_.depth, [&](int64_t k) {
                     const A factor = power_of_two<A>(-p_.key.exponents[scores().key_slice(t)]);
                     read_row(args_.key, t.batch, t.head / (p_.heads / p_.kv_heads), tile * kAttentionKeys + k,
                              p_.depth, factor, key_row_);
                     return key_row_;
                   });
  }

  void write_query(const RowTile& t, int64_t r) const {
    const int exponent = gradient_exponent(t, r) + p_.key.exponents[scores().key_slice(t)] + scale_.exponent;
    visit_stored<A>(p_.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      T* out = static_cast<T*>(args_.grad_query) + (scores().query_slice(t) * p_.queries + t.row + r) * p_.depth;
      write_row(out, sums_ + r * columns_, p_.depth, scale_.fraction, exponent);
    });
  }

  // --- the mask's gradient: double sums for [row of the task, or one][key, or one]

  int64_t mask_rows() const { return args_.mask_size[2] == 1 ? 1 : args_.tile_rows; }
  int64_t mask_keys() const { return args_.mask_size[3]; }

  void clear_mask_sums() {
    for (int64_t i = 0; args_.grad_mask && i < mask_rows() * mask_keys(); ++i) {
      args_.mask_scratch[i] = 0;
    }
  }

  void add_to_mask(const RowTile& t, int64_t r, int64_t tile, const A* gradients) {
    double* sums = args_.mask_scratch + (args_.mask_size[2] == 1 ? 0 : r * mask_keys());
    const double factor = __builtin_ldexp(1.0, gradient_exponent(t, r));
    const int64_t first = tile * kAttentionKeys;
    for (int64_t j = 0; j < scores().keys_in(tile); ++j) {
      sums[mask_keys() == 1 ? 0 : first + j] += static_cast<double>(gradients[j]) * factor;
    }
  }

  void write_mask(int64_t batch, int64_t head, int64_t row) const {
    if (!args_.grad_mask) {
      return;
    }
    const int64_t* size = args_.mask_size;
    const int64_t b = size[0] == 1 ? 0 : batch, h = size[1] == 1 ? 0 : head, i = size[2] == 1 ? 0 : row;
    const int64_t offset = ((b * size[1] + h) * size[2] + i) * size[3];
    const int64_t count = smaller(mask_rows(), size[2] - i) * size[3];
    visit_dtype(p_.mask_dtype, [&](auto type) {
      using M = typename decltype(type)::type;
      M* out = static_cast<M*>(args_.grad_mask) + offset;
      for (int64_t k = 0; k < count; ++k) {
        out[k] = narrow<M>(args_.mask_scratch[k]);
      }
    });
  }

  const AttentionRowsArgs& args_;
  const AttentionProblem& p_;
  int64_t columns_;
  Scale<A> scale_;
  A *buffer_, *key_row_, *sums_;
  Tile<A> all_;
  BackwardTiles<A> tiles_;
};

}  // namespace

void attention_backward_rows(const AttentionRowsArgs& args) {
  const auto run = [&](auto a) {
    BackwardRows<typename decltype(a)::type> backward(args);
    for (int64_t task = args.begin; task < args.end; ++task) {
      backward.task(task);
    }
  };
  args.problem.dtype == DType::kFloat64 ? run(Tag<double>{}) : run(Tag<float>{});
}

}  // namespace allfinite::cpu::ALLFINITE_ISA
