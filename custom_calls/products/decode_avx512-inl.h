// What packing reads, with AVX-512: codes and high-precision values to the words that panels hold,
// panels of codes of six bits (weights.h), and the scales of 32 rows with the range that they span.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_

#include <immintrin.h>
#include <stdint.h>

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
  __m512i bytes = _mm512_shuffle_epi8(table[0], low);
  if (levels == 1) return bytes;
  // In steps of 16: bits 4 and 5 choose the table.
  const __m512i group = _mm512_and_si512(codes, _mm512_set1_epi8(0x30));
  MX_UNROLL
  for (int i = 1; i < 4; ++i) {
    const __mmask64 mine = _mm512_cmpeq_epi8_mask(group, _mm512_set1_epi8((char)(16 * i)));
    bytes = _mm512_mask_shuffle_epi8(bytes, mine, table[i], low);
  }
  return bytes;
}

// 32 codes to the 32 words that the table of 256 has for them.
MX_INLINE __m512i LookupWords(const Decoder& decoder, __m256i codes) {
  const __m512i index = _mm512_cvtepu8_epi16(codes);
  const __m512i* t = decoder.table;
  __m512i words = _mm512_permutex2var_epi16(t[0], index, t[1]);
  const __mmask32 bit6 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
  const __mmask32 bit7 = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
  words = _mm512_mask_mov_epi16(words, bit6, _mm512_permutex2var_epi16(t[2], index, t[3]));
  const __m512i upper = _mm512_mask_mov_epi16(_mm512_permutex2var_epi16(t[4], index, t[5]), bit6,
                                              _mm512_permutex2var_epi16(t[6], index, t[7]));
  return _mm512_mask_mov_epi16(words, bit7, upper);
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

// Sixteen positions along k of 32 rows: three pairs of vectors, which hold four.
constexpr int kSixBytes = 3 * kTileColumns * 4;

// One word of `first` where the mask has ones, else of `second`.
MX_INLINE __m512i Select(__m512i mask, __m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(mask, first, second, 0xca);
}

// The last four of sixteen positions, of 16 rows, from bits 6 and 7 of the others; its own bits 6
// and 7 are anything. To shift words does no harm: no byte's bits reach where they count in another.
MX_INLINE __m512i LastOfSixteen(const char* from) {
  constexpr int kStep = kTileColumns * 4;
  const __m512i low = _mm512_srli_epi16(_mm512_load_si512(from), 6);
  const __m512i middle = _mm512_srli_epi16(_mm512_load_si512(from + kStep), 4);
  const __m512i high = _mm512_srli_epi16(_mm512_load_si512(from + 2 * kStep), 2);
  const __m512i both = Select(_mm512_set1_epi8(3), low, middle);
  return Select(_mm512_set1_epi8(15), both, high);
}

// Positions 4 * word .. 4 * word + 3 of 16 rows; bits 6 and 7 are anything.
MX_INLINE __m512i LoadSix(const char* codes, int word) {
  const char* from = codes + word / 4 * kSixBytes;
  return word % 4 == 3 ? LastOfSixteen(from)
                       : _mm512_load_si512(from + word % 4 * kTileColumns * 4);
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

// The float32 scales of 32 rows of one chunk.
MX_INLINE void LoadScales(const Source& source, const float* table, int64_t first_row,
                          int64_t chunk, __m512 scales[2][2], ScaleBounds* bounds) {
  const int per_chunk = kChunk / source.block;
  for (int s = 0; s < per_chunk; ++s) {
    const int64_t block = chunk * per_chunk + s;
    scales[s][0] = scales[s][1] = _mm512_set1_ps(1.0f);
    if (source.scale_kind == kNoScale || block * source.block >= source.k) continue;
    alignas(32) uint8_t each[kTileColumns];
    LoadScaleBytes(source, first_row, block, kTileColumns, each);
    const __m256i bytes = _mm256_load_si256((const __m256i*)each);
    if (source.scale_kind == kScaleE8M0) {
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

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX512_INL_H_
