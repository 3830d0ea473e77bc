// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)
// of a place's number, as JAX's partitionable threefry counts: each place by itself.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_

#include <stdint.h>

#include "common/isas.h"
#include "common/macros.h"

namespace mx {
namespace {

MX_INLINE uint32_t RotateLeft(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// Of kCount places side by side, so that no unit waits for the sum before.
template <int kCount>
MX_INLINE void ThreefryRound(int by, uint32_t (&a)[kCount], uint32_t (&b)[kCount]) {
  for (int i = 0; i < kCount; ++i) a[i] += b[i];
  for (int i = 0; i < kCount; ++i) b[i] = RotateLeft(b[i], by) ^ a[i];
}

template <int kCount>
MX_INLINE void FourRounds(int r0, int r1, int r2, int r3, uint32_t next_a, uint32_t next_b,
                          uint32_t (&a)[kCount], uint32_t (&b)[kCount]) {
  ThreefryRound(r0, a, b);
  ThreefryRound(r1, a, b);
  ThreefryRound(r2, a, b);
  ThreefryRound(r3, a, b);
  for (int i = 0; i < kCount; ++i) a[i] += next_a, b[i] += next_b;
}

// Of a key's two words, and of each place's two, two words in their place.
template <int kCount>
MX_INLINE void Threefry(uint32_t k0, uint32_t k1, uint32_t (&a)[kCount], uint32_t (&b)[kCount]) {
  const uint32_t k2 = k0 ^ k1 ^ 0x1BD11BDAu;
  for (int i = 0; i < kCount; ++i) a[i] += k0, b[i] += k1;
  FourRounds(13, 15, 26, 6, k1, k2 + 1, a, b);
  FourRounds(17, 29, 16, 24, k2, k0 + 2, a, b);
  FourRounds(13, 15, 26, 6, k0, k1 + 3, a, b);
  FourRounds(17, 29, 16, 24, k1, k2 + 4, a, b);
  FourRounds(13, 15, 26, 6, k2, k0 + 5, a, b);
}

}  // namespace

struct RandomBitsKernels {
  // The bits at the places first..first + count - 1 of an array, by its key: `width` of them in each
  // int32, those that `jax.random.bits` gives of uint16 up to 16, of uint32 beyond. The places share
  // their upper 32 bits.
  void (*fill)(const uint32_t* key, uint64_t first, int64_t count, int width, int32_t* out);
};

// Of random_bits_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(RandomBitsKernels, kRandomBits)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_THREEFRY_H_
