// Codes and high-precision values to the words that panels hold, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_

#include <immintrin.h>

#include "common/macros.h"
#include "common/target.h"
#include "products/kernels.h"

// GCC 12 takes its own undefined vectors for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#define MX_UNROLL _Pragma("GCC unroll 32")

namespace mx::MX_TARGET {
namespace {

struct Decoder {
  __m512i table[8];
  Element element;
  int levels;  // of a table of bytes: 0 none, 1 up to 16 codes, 2 up to 64
};

MX_INLINE Decoder MakeDecoder(Element element, PanelType type) {
  Decoder decoder;
  decoder.element = element;
  decoder.levels = element == kElementInt8 ? 0 : element == kE2M1 ? 1 : 2;
  for (int i = 0; i < 8; ++i) decoder.table[i] = _mm512_setzero_si512();
  if (element > kElementInt8) return decoder;
  const ElementTables& tables = TablesOf(element);
  if (type == kInt8) {
    for (int i = 0; i < 4; ++i) {
      decoder.table[i] =
          _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(tables.int8 + 16 * i)));
    }
  } else {
    const void* words = type == kInt16 ? (const void*)tables.int16 : (const void*)tables.bf16;
    for (int i = 0; i < 8; ++i) decoder.table[i] = _mm512_loadu_si512((const char*)words + 64 * i);
  }
  return decoder;
}

// Bytes of codes below 16 (one level), or 64 (two), of which bits 6 and 7 are anything.
MX_INLINE __m512i LookupBytes(const __m512i* table, int levels, __m512i codes) {
  if (levels == 0) return codes;
  const __m512i low = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  __m512i found = _mm512_shuffle_epi8(table[0], low);
  if (levels == 1) return found;
  // In steps of 16: bits 4 and 5 choose the table.
  const __m512i group = _mm512_and_si512(codes, _mm512_set1_epi8(0x30));
  MX_UNROLL
  for (int i = 1; i < 4; ++i) {
    const __mmask64 mine = _mm512_cmpeq_epi8_mask(group, _mm512_set1_epi8((char)(16 * i)));
    found = _mm512_mask_shuffle_epi8(found, mine, table[i], low);
  }
  return found;
}

// 32 codes to the 32 words that the table of 256 has for them.
MX_INLINE __m512i LookupWords(const Decoder& decoder, __m256i codes) {
  const __m512i index = _mm512_cvtepu8_epi16(codes);
  const __m512i* t = decoder.table;
  __m512i found = _mm512_permutex2var_epi16(t[0], index, t[1]);
  const __mmask32 bit6 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
  const __mmask32 bit7 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
  found = _mm512_mask_mov_epi16(found, bit6, _mm512_permutex2var_epi16(t[2], index, t[3]));
  const __m512i upper = _mm512_mask_mov_epi16(_mm512_permutex2var_epi16(t[4], index, t[5]), bit6,
                                              _mm512_permutex2var_epi16(t[6], index, t[7]));
  return _mm512_mask_mov_epi16(found, bit7, upper);
}

// 32 bf16 to 32 float32: a shift.
struct Elements32 {
  __m512i low, high;
};

MX_INLINE Elements32 Widen(__m512i words) {
  return {_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words)), 16),
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1)), 16)};
}

MX_INLINE __mmask32 FirstOf32(int count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// `count` of 32 consecutive codes, zeros after them.
MX_INLINE __m256i LoadCodes(const Source& source, int64_t at, int count) {
  return _mm256_maskz_loadu_epi8(FirstOf32(count), (const uint8_t*)source.elements + at);
}

// `count` of 32 consecutive high-precision values, zeros after them: as they are for kBf16, else as
// float32.
template <PanelType kType>
MX_INLINE Elements32 LoadValues(const Source& source, int64_t at, int count) {
  const __mmask32 mask = FirstOf32(count);
  if (source.element == kElementFloat32) {
    const float* p = (const float*)source.elements + at;
    return {_mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)mask, p)),
            _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)(mask >> 16), p + 16))};
  }
  const __m512i words = _mm512_maskz_loadu_epi16(mask, (const uint16_t*)source.elements + at);
  if (source.element == kElementF16) {
    return {_mm512_castps_si512(_mm512_cvtph_ps(_mm512_castsi512_si256(words))),
            _mm512_castps_si512(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1)))};
  }
  if (kType == kBf16) return {words, _mm512_setzero_si512()};
  return Widen(words);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_
