// Which weights dropout keeps: a Philox4x32-10 stream (Salmon et al., 2011) with the seed as key and (column / 4, row,
// head, batch) as counter, one 32-bit number a weight. So the mask depends on the position alone: not on tiles, threads
// or the device, and forward and backward agree.
#pragma once
#include <cstdint>

namespace allfinite::cpu::ALLFINITE_ISA {
namespace {

struct Philox {
  uint32_t word[4];
};

inline Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c0, b = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// Factors of n weights from `column` (a multiple of 4) on: 0 or 1 / (1 - p). The probability is exact to 2^-32.
template <class A>
void dropout_factors(uint64_t seed, double p, int64_t batch, int64_t head, int64_t row, int64_t column, int64_t n,
                     A* factors) {
  const uint64_t threshold = static_cast<uint64_t>((1.0 - p) * 0x1p32 + 0.5);
  const A keep = p < 1 ? static_cast<A>(1.0 / (1.0 - p)) : A(0);
  for (int64_t i = 0; i < n; i += 4) {
    const Philox random = philox(static_cast<uint32_t>((column + i) / 4), static_cast<uint32_t>(row),
                                 static_cast<uint32_t>(head), static_cast<uint32_t>(batch), seed);
    for (int64_t k = 0; k < 4 && i + k < n; ++k) {
      factors[i + k] = random.word[k] < threshold ? keep : A(0);
    }
  }
}

}  // namespace
}  // namespace allfinite::cpu::ALLFINITE_ISA
