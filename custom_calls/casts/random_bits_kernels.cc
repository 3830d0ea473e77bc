// The kernels of random bits, compiled for each instruction set: see common/target.h.
#include "casts/threefry.h"
#include "common/macros.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// Of kCount parts of `step` places each, which share their upper 32 bits.
template <int kCount>
MX_INLINE void FillParts(const uint32_t* key, uint64_t first, int64_t step, int width, int32_t* out) {
  const uint32_t k0 = key[0], k1 = key[1];
  const uint32_t high = static_cast<uint32_t>(first >> 32), low = static_cast<uint32_t>(first);
  const uint32_t mask = width > 16 ? 0xFFFFFFFFu : 0xFFFFu;
  const int shift = (width > 16 ? 32 : 16) - width;
  for (int64_t i = 0; i < step; ++i) {
    uint32_t a[kCount], b[kCount];
    for (int part = 0; part < kCount; ++part) {
      a[part] = high;
      b[part] = low + static_cast<uint32_t>(i + part * step);
    }
    Threefry(k0, k1, a, b);
    for (int part = 0; part < kCount; ++part) {
      out[i + part * step] = static_cast<int32_t>(((a[part] ^ b[part]) & mask) >> shift);
    }
  }
}

void Fill(const uint32_t* key, uint64_t first, int64_t count, int width, int32_t* out) {
  constexpr int kParts = 4;
  const int64_t step = count / kParts, done = step * kParts;
  FillParts<kParts>(key, first, step, width, out);
  FillParts<1>(key, first + static_cast<uint64_t>(done), count - done, width, out + done);
}

}  // namespace

const RandomBitsKernels kRandomBits = {Fill};

}  // namespace mx::MX_TARGET
