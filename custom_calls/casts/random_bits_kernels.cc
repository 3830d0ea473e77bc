// The kernels of random bits, compiled for each instruction set: see common/target.h.
//
// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)
// of a place's number, as JAX's partitionable threefry counts: each place by itself.
#include "casts/random_bits.h"
#include "common/macros.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE uint32_t Rotate(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

MX_INLINE void Round(int by, uint32_t* a, uint32_t* b) {
  *a += *b;
  *b = Rotate(*b, by) ^ *a;
}

MX_INLINE uint32_t Threefry(uint32_t k0, uint32_t k1, uint32_t k2, uint32_t high, uint32_t low) {
  uint32_t a = high + k0, b = low + k1;
  Round(13, &a, &b), Round(15, &a, &b), Round(26, &a, &b), Round(6, &a, &b);
  a += k1, b += k2 + 1;
  Round(17, &a, &b), Round(29, &a, &b), Round(16, &a, &b), Round(24, &a, &b);
  a += k2, b += k0 + 2;
  Round(13, &a, &b), Round(15, &a, &b), Round(26, &a, &b), Round(6, &a, &b);
  a += k0, b += k1 + 3;
  Round(17, &a, &b), Round(29, &a, &b), Round(16, &a, &b), Round(24, &a, &b);
  a += k1, b += k2 + 4;
  Round(13, &a, &b), Round(15, &a, &b), Round(26, &a, &b), Round(6, &a, &b);
  a += k2, b += k0 + 5;
  return a ^ b;
}

void Fill(const uint32_t* key, uint64_t first, int64_t count, int width, int32_t* out) {
  const uint32_t k0 = key[0], k1 = key[1], k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  const uint32_t high = static_cast<uint32_t>(first >> 32), low = static_cast<uint32_t>(first);
  const uint32_t mask = width > 16 ? 0xFFFFFFFFu : 0xFFFFu;
  const int shift = (width > 16 ? 32 : 16) - width;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Threefry(k0, k1, k2, high, low + static_cast<uint32_t>(i));
    out[i] = static_cast<int32_t>((bits & mask) >> shift);
  }
}

}  // namespace

const RandomBitsKernels kRandomBits = {Fill};

}  // namespace mx::MX_TARGET
