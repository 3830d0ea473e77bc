// What the kernels of random bits are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_RANDOM_BITS_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_RANDOM_BITS_H_

#include <stdint.h>

#include "common/isas.h"

namespace mx {

struct RandomBitsKernels {
  // The bits at the places first..first + count - 1 of an array, by its key: `width` of them in each
  // int32, those that `jax.random.bits` gives of uint16 up to 16, of uint32 beyond. The places share
  // their upper 32 bits.
  void (*fill)(const uint32_t* key, uint64_t first, int64_t count, int width, int32_t* out);
};

// Of random_bits_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(RandomBitsKernels, kRandomBits)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_RANDOM_BITS_H_
