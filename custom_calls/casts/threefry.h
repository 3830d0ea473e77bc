// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)
// of a place's number, as JAX's partitionable threefry counts: each place by itself.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_

#include <stdint.h>

#include "common/macros.h"

namespace mx {
namespace {

MX_INLINE uint32_t RotateLeft(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

MX_INLINE void ThreefryRound(int by, uint32_t* a, uint32_t* b) {
  *a += *b;
  *b = RotateLeft(*b, by) ^ *a;
}

MX_INLINE void FourRounds(int r0, int r1, int r2, int r3, uint32_t* a, uint32_t* b) {
  ThreefryRound(r0, a, b);
  ThreefryRound(r1, a, b);
  ThreefryRound(r2, a, b);
  ThreefryRound(r3, a, b);
}

// Two words of a key's two and of a place's two.
MX_INLINE void Threefry(uint32_t k0, uint32_t k1, uint32_t high, uint32_t low, uint32_t* first,
                        uint32_t* second) {
  const uint32_t k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  uint32_t a = high + k0, b = low + k1;
  FourRounds(13, 15, 26, 6, &a, &b);
  a += k1, b += k2 + 1;
  FourRounds(17, 29, 16, 24, &a, &b);
  a += k2, b += k0 + 2;
  FourRounds(13, 15, 26, 6, &a, &b);
  a += k0, b += k1 + 3;
  FourRounds(17, 29, 16, 24, &a, &b);
  a += k1, b += k2 + 4;
  FourRounds(13, 15, 26, 6, &a, &b);
  a += k2, b += k0 + 5;
  *first = a, *second = b;
}

}  // namespace
}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_
