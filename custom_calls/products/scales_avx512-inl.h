// The scales of 32 rows, and the range that they span, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_SCALES_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_SCALES_AVX512_INL_H_

#include <immintrin.h>

#include "products/decode_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE const uint8_t* ScalesOfBlock(const Source& source, int64_t first_row, int64_t block) {
  if (source.layout != kStrided) {
    return ScalesAt(source, first_row, block);
  }
  return source.scales + block * source.scale_block_stride + first_row * source.scale_row_stride;
}

// The smallest and largest bytes of a panel's E8M0 scales.
struct ScaleBounds {
  __m256i low, high;
};

MX_INLINE ScaleBounds NoBounds() { return {_mm256_set1_epi8((char)0xff), _mm256_setzero_si256()}; }

MX_INLINE void AddTo(const ScaleBounds& bounds, ScaleRange* range) {
  uint8_t low[32], high[32];
  _mm256_storeu_si256((__m256i*)low, bounds.low);
  _mm256_storeu_si256((__m256i*)high, bounds.high);
  for (int i = 1; i < 32; ++i) {
    if (low[i] < low[0]) low[0] = low[i];
    if (high[i] > high[0]) high[0] = high[i];
  }
  if (low[0] > high[0]) return;
  if (low[0] - 127 < range->low) range->low = low[0] - 127;
  const int largest = high[0] == 255 ? 1000 : high[0] - 127;
  if (largest > range->high) range->high = largest;
}

// 32 scale bytes of one block of 32 rows; 127, which is 1, where there is none.
MX_INLINE __m256i LoadScaleBytes(const Source& source, int64_t first_row, int64_t block,
                                 int count) {
  const uint8_t* p = ScalesOfBlock(source, first_row, block);
  const __m256i one = _mm256_set1_epi8(127);
  if (source.scale_row_stride == 1) return _mm256_mask_loadu_epi8(one, FirstOf32(count), p);
  uint8_t bytes[32];
  _mm256_storeu_si256((__m256i*)bytes, one);
  for (int i = 0; i < count; ++i) bytes[i] = p[i * source.scale_row_stride];
  return _mm256_loadu_si256((const __m256i*)bytes);
}

MX_INLINE __m256i WithoutZeroBlocks(const Source& source, int64_t first_row, int64_t block,
                                    __m256i bytes) {
  __mmask32 small = _mm256_cmplt_epu8_mask(bytes, _mm256_set1_epi8(32));
  if (MX_LIKELY(small == 0) || source.layout != kStrided) return bytes;
  __mmask32 zero = 0;
  for (int i = 0; i < 32; ++i) {
    if ((small >> i & 1) && IsZeroBlock(source, first_row + i, block)) zero |= 1u << i;
  }
  return _mm256_mask_mov_epi8(bytes, zero, _mm256_set1_epi8(127));
}

// The float32 scales of 32 rows of one chunk.
MX_INLINE void LoadScales(const Source& source, const float* table, int64_t first_row,
                          int64_t chunk, __m512 scales[2][2], ScaleBounds* bounds) {
  const int per_chunk = kChunk / source.block;
  const int64_t num_blocks = (source.k + source.block - 1) / source.block;
  const int64_t left = source.rows - first_row;
  const int count = left < 0 ? 0 : left < 32 ? (int)left : 32;
  for (int s = 0; s < per_chunk; ++s) {
    const int64_t block = chunk * per_chunk + s;
    scales[s][0] = scales[s][1] = _mm512_set1_ps(1.0f);
    if (source.scale_kind == kNoScale || block >= num_blocks) continue;
    __m256i bytes = LoadScaleBytes(source, first_row, block, count);
    if (source.scale_kind == kScaleE8M0) {
      bytes = WithoutZeroBlocks(source, first_row, block, bytes);
      bounds->low = _mm256_min_epu8(bounds->low, bytes);
      bounds->high = _mm256_max_epu8(bounds->high, bytes);
    }
    for (int half = 0; half < 2; ++half) {
      const __m512i index = _mm512_cvtepu8_epi32(half ? _mm256_extracti128_si256(bytes, 1)
                                                      : _mm256_castsi256_si128(bytes));
      scales[s][half] = _mm512_i32gather_ps(index, table, 4);
    }
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_SCALES_AVX512_INL_H_
