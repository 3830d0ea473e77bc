// Tiles to the output, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_AVX512_INL_H_

#include <immintrin.h>

#include "common/macros.h"
#include "common/target.h"
#include "products/kernels.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE __m256i RoundToBf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_srli_epi32(rounded, 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}

}  // namespace

void Store(const float* tile, int rows, int columns, float alpha, OutType type, void* out,
           int64_t out_stride) {
  const __m512 factor = _mm512_set1_ps(alpha);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; j += 16) {
      const int left = columns - j;
      const __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
      const __m512 values = _mm512_mul_ps(_mm512_load_ps(tile + i * kTileColumns + j), factor);
      const int64_t at = i * out_stride + j;
      if (type == kOutFloat32 && left >= 16) {
        _mm512_storeu_ps((float*)out + at, values);
      } else if (type == kOutFloat32) {
        _mm512_mask_storeu_ps((float*)out + at, mask, values);
      } else {
        const __m256i half = type == kOutBf16 ? RoundToBf16(values)
                                              : _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
        _mm256_mask_storeu_epi16((uint16_t*)out + at, mask, half);
      }
    }
  }
}

}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_AVX512_INL_H_
