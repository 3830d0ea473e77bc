// The kernels of random bits, compiled for each instruction set: see common/target.h.
#include "casts/random_bits.h"
#include "casts/threefry.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

void Fill(const uint32_t* key, uint64_t first, int64_t count, int width, int32_t* out) {
  const uint32_t k0 = key[0], k1 = key[1];
  const uint32_t high = static_cast<uint32_t>(first >> 32), low = static_cast<uint32_t>(first);
  const uint32_t mask = width > 16 ? 0xFFFFFFFFu : 0xFFFFu;
  const int shift = (width > 16 ? 32 : 16) - width;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t a, b;
    Threefry(k0, k1, high, low + static_cast<uint32_t>(i), &a, &b);
    out[i] = static_cast<int32_t>(((a ^ b) & mask) >> shift);
  }
}

}  // namespace

const RandomBitsKernels kRandomBits = {Fill};

}  // namespace mx::MX_TARGET
