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

// Copies packed panels of float32 to `out`, times kFoldLhs. False where that might change a bit or
// come near a subnormal.
inline bool FoldLhs(const Source& source, const Sizes& sizes, const char* lhs, char* out) {
  const int64_t scales = kChunk / source.block * kTileRows;
  const int64_t panels = (source.rows + kTileRows - 1) / kTileRows;
  int outside = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t chunk = 0; chunk < sizes.chunks; ++chunk) {
      const int64_t at = panel * sizes.lhs_panel + chunk * sizes.lhs_chunk;
      const float* from = reinterpret_cast<const float*>(lhs + at);
      float* to = reinterpret_cast<float*>(out + at);
      std::memcpy(to, from, static_cast<size_t>(scales) * sizeof(float));
      from += scales, to += scales;
      for (int64_t i = 0; i < kChunk * kTileRows; ++i) {
        uint32_t magnitude;
        std::memcpy(&magnitude, from + i, sizeof magnitude);
        magnitude &= 0x7fffffff;
        outside |= !IsFoldable(magnitude);
      }
      if (outside) return false;
      for (int64_t i = 0; i < kChunk * kTileRows; ++i) to[i] = from[i] * kFoldLhs;
    }
  }
  return true;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_FOLD_H_
