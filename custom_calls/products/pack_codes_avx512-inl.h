// Codes as they come to panels of codes (weights.h), with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_AVX512_INL_H_

#include <immintrin.h>
#include <string.h>

#include "products/pack_avx512-inl.h"
#include "products/panels6_avx512-inl.h"
#include "products/weights.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE __mmask64 SpecialCodes(Element element, __m512i codes) {
  if (element != kE4M3 && element != kE5M2) return 0;
  const __m512i mask = _mm512_set1_epi8(element == kE4M3 ? 0x7f : 0x7c);
  return _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, mask), mask);
}

// Of floats of 8 bits.
MX_INLINE __mmask64 SubnormalCodes(Element element, __m512i codes) {
  if (element != kE4M3 && element != kE5M2) return 0;
  const __m512i one = _mm512_set1_epi8(1), last = _mm512_set1_epi8(element == kE4M3 ? 7 : 3);
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
  return _mm512_cmplt_epu8_mask(_mm512_sub_epi8(magnitude, one), last);
}

}  // namespace

void PackCodes(const Source& source, int64_t first_row, uint8_t* out) {
  const WeightSizes sizes = SizesOfWeights(source.element, source.block, source.rows, source.k);
  const Source packed = PackedSource(source, out);
  const Layout layout = packed.layout;
  const __m512i low_bits =
      _mm512_set1_epi8(layout == kPanels4 ? 15 : layout == kPanels6 ? 63 : (char)0xff);
  const int64_t num_chunks = (source.k + kChunk - 1) / kChunk;
  const int shift = SummaryShift(num_chunks);
  PanelSummary summary = {};
  summary.mark = kPanelMark;
  __mmask64 special = 0;
  for (int64_t chunk = 0; chunk < sizes.records * kRecordChunks; ++chunk) {
    __m512i words[2][8];
    ChunkCodes(source, first_row, chunk, words[0], words[1]);
    char* to = (char*)CodesAt(packed, 0, chunk);
    __mmask64 subnormal = 0;
    MX_UNROLL
    for (int half = 0; half < 2; ++half) {
      MX_UNROLL
      for (int g = 0; g < 8; ++g) {
        const __m512i codes = _mm512_and_si512(words[half][g], low_bits);
        special |= SpecialCodes(source.element, codes);
        subnormal |= SubnormalCodes(source.element, codes);
        words[half][g] = codes;
        if (layout == kPanels8) {
          _mm512_store_si512(to + 128 * g + 64 * half, codes);
        } else if (layout == kPanels6) {
          char* sixteen = to + g / 4 * kSixBytes + 64 * half;
          if (g % 4 == 3) StoreSixteen(&words[half][g - 3], sixteen);
        } else if (g % 2) {
          const __m512i both =
              _mm512_or_si512(words[half][g - 1], _mm512_slli_epi16(words[half][g], 4));
          _mm512_store_si512(to + 64 * (g - 1) + 64 * half, both);
        }
      }
    }
    const int64_t bit = chunk >> shift;
    if (subnormal != 0) summary.subnormal[bit / 8] |= (uint8_t)(1 << bit % 8);
  }
  const int64_t num_blocks = (source.k + source.block - 1) / source.block;
  const int64_t wanted = sizes.records * kRecordChunks * (kChunk / source.block);
  const int64_t left = source.rows - first_row;
  const int count = left < 0 ? 0 : left < 32 ? (int)left : 32;
  const bool powers = source.scale_kind == kScaleE8M0;
  const __m256i one = _mm256_set1_epi8(powers ? 127 : 0x38);
  __m256i low = one, high = one;
  for (int64_t block = 0; block < wanted; ++block) {
    __m256i bytes = one;
    if (block < num_blocks) {
      bytes = LoadScaleBytes(source, first_row, block, count);
      if (powers) bytes = WithoutZeroBlocks(source, first_row, block, bytes);
      bytes = _mm256_mask_mov_epi8(one, FirstOf32(count), bytes);
    }
    low = _mm256_min_epu8(low, bytes), high = _mm256_max_epu8(high, bytes);
    _mm256_store_si256((__m256i*)ScalesAt(packed, 0, block), bytes);
  }
  uint8_t lowest[32], highest[32];
  _mm256_storeu_si256((__m256i*)lowest, low), _mm256_storeu_si256((__m256i*)highest, high);
  summary.low = lowest[0], summary.high = highest[0];
  for (int i = 1; i < 32; ++i) {
    if (lowest[i] < summary.low) summary.low = lowest[i];
    if (highest[i] > summary.high) summary.high = highest[i];
  }
  summary.special = special != 0 || (!powers && summary.high >= 0x7f);
  memcpy(out, &summary, sizeof summary);
}

}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_AVX512_INL_H_
