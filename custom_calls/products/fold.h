// A factor of codes that lhs takes, so that no value is decoded with a multiplication of its own.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_FOLD_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_FOLD_H_

#include <cstdint>
#include <cstring>

#include "products/kernels.h"
#include "products/problem.h"

namespace mx {

// Whether a float of this magnitude, as bits, is 0, or between 2^-34 and 2^40.
inline bool IsFoldable(uint32_t magnitude) {
  const uint32_t lowest = (127 - 34) << 23, highest = (127 + 40) << 23;
  return (magnitude == 0) | (magnitude - lowest <= highest - lowest);
}

// Copies a panel of float32 lhs of `rows` rows to `out`, times kFoldLhs. False where that might
// change a bit or come near a subnormal.
inline bool FoldLhs(int32_t block, int64_t num_chunks, int rows, const char* lhs, char* out) {
  const float* from = reinterpret_cast<const float*>(lhs);
  float* to = reinterpret_cast<float*>(out);
  const int64_t num_scales = kChunk / block * rows, count = kChunk * rows;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::memcpy(to, from, static_cast<size_t>(num_scales) * sizeof(float));
    from += num_scales, to += num_scales;
    int outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      uint32_t magnitude;
      std::memcpy(&magnitude, from + i, sizeof magnitude);
      outside |= !IsFoldable(magnitude & 0x7fffffff);
    }
    if (outside) return false;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] * kFoldLhs;
    from += count, to += count;
  }
  return true;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_FOLD_H_
