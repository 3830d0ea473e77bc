// Panels of codes (weights.h) by one to eight rows, decoded on their way, with AVX2. Adds in the order
// in which an unpacked panel is added, so the bits are the same.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_

#include <immintrin.h>
#include <stdint.h>

#include "products/kernels.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 8;

// 8 lanes of a table of floats.
MX_INLINE __m256 Gathered(const float* table, __m256i index) {
  return _mm256_i32gather_ps(table, index, 4);
}

// Word `word` of a chunk, of 8 rows: its codes are in the bits that `CodesOfWord` looks at.
template <Layout kLayout>
MX_INLINE __m256i LoadWord(const uint8_t* codes, int word) {
  constexpr int kStep = kTileColumns * 4;
  const auto load = [&](int at) { return _mm256_load_si256((const __m256i*)(codes + at * kStep)); };
  if (kLayout != kPanels6) return load(word);
  const int first = word / 4 * 3;
  if (word % 4 < 3) return load(first + word % 4);
  const auto part = [&](int i) {
    const __m256i bits = _mm256_srli_epi32(load(first + i), 6 - 2 * i);
    return _mm256_and_si256(bits, _mm256_set1_epi32(0x03030303 << 2 * i));
  };
  return _mm256_or_si256(_mm256_or_si256(part(0), part(1)), part(2));
}

// Values of code `i` of a word, of 8 rows. `small` are the magnitudes of 3 bits.
template <Layout kLayout>
MX_INLINE __m256 ValuesOf(const float* table, __m256 small, __m256i word, int i) {
  if (kLayout == kPanels4) {
    // The look-up minds 3 bits of each lane, and the next one is the sign.
    const __m256i code = _mm256_srli_epi32(word, i % 4 * 8 + i / 4 * 4);
    const __m256i sign =
        _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32((int)0x80000000));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(small, code), _mm256_castsi256_ps(sign));
  }
  const __m256i mask = _mm256_set1_epi32(kLayout == kPanels6 ? 63 : 255);
  return Gathered(table, _mm256_and_si256(_mm256_srli_epi32(word, 8 * i), mask));
}

MX_INLINE __m256 ScalesOf(ScaleKind kind, const float* table, const uint8_t* bytes) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
  if (kind == kScaleE8M0) return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
  return Gathered(table, wide);
}

// One block by kRows rows, as many columns at a time as there are registers for their sums.
// `left` is the chunk of lhs that the block is in, as its block `block`.
template <Layout kLayout, int kRows>
MX_INLINE void AddBlock(const CodesProduct& p, const uint8_t* codes, const uint8_t* scales,
                        const float* left, int block) {
  constexpr int kGroups = kRows > 4 ? 1 : kRows > 1 ? 2 : 4, kCodes = kLayout == kPanels4 ? 8 : 4;
  const float* table = TablesOf(p.element).float32;
  const float* scale_table = ScaleTable(p.scale_kind, p.element, kFloat32);
  const __m256 small = _mm256_loadu_ps(table);
  const int words = p.block / kCodes;
  for (int column = 0; column < kTileColumns; column += kLanes * kGroups) {
    const float* value = left + (kChunk / p.block + block * p.block) * kRows;
    __m256 sum[kRows][kGroups];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kGroups; ++j) sum[i][j] = _mm256_setzero_ps();
    }
    for (int w = 0; w < words; ++w) {
      __m256i word[kGroups];
      for (int j = 0; j < kGroups; ++j) {
        const uint8_t* from = codes + 4 * (column + kLanes * j);
        word[j] = LoadWord<kLayout>(from, block * words + w);
      }
      for (int c = 0; c < kCodes; ++c, value += kRows) {
        __m256 values[kGroups];
        for (int j = 0; j < kGroups; ++j) {
          values[j] = ValuesOf<kLayout>(table, small, word[j], c);
        }
        for (int i = 0; i < kRows; ++i) {
          const __m256 factor = _mm256_broadcast_ss(value + i);
          for (int j = 0; j < kGroups; ++j) {
            sum[i][j] = _mm256_fmadd_ps(values[j], factor, sum[i][j]);
          }
        }
      }
    }
    for (int j = 0; j < kGroups; ++j) {
      const int at = column + kLanes * j;
      const __m256 right = ScalesOf(p.scale_kind, scale_table, scales + at);
      for (int i = 0; i < kRows; ++i) {
        float* total = p.tile + i * kTileColumns + at;
        const __m256 mine = _mm256_broadcast_ss(left + block * kRows + i);
        const __m256 added = _mm256_mul_ps(sum[i][j], _mm256_mul_ps(mine, right));
        _mm256_store_ps(total, _mm256_add_ps(_mm256_load_ps(total), added));
      }
    }
  }
}

template <Layout kLayout, int kRows>
void MultiplyCodesOf(const CodesProduct& p) {
  constexpr int64_t kChunkBytes = PanelChunkBytes(kLayout);
  const int blocks = kChunk / p.block;
  for (int i = 0; p.clear && i < kRows * kTileColumns; ++i) p.tile[i] = 0.0f;
  for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
    const uint8_t* record = (const uint8_t*)p.records +
                            chunk / kRecordChunks * RecordBytes(kLayout, p.block);
    const uint8_t* codes = record + RecordScaleBytes(p.block) + chunk % kRecordChunks * kChunkBytes;
    const uint8_t* scales = record + chunk % kRecordChunks * blocks * kTileColumns;
    const float* left = (const float*)(p.lhs + chunk * ChunkBytes(kFloat32, p.block, kRows, true));
    for (int64_t line = 0; line < kChunkBytes; line += 64) {
      _mm_prefetch((const char*)codes + 2048 + line, _MM_HINT_T0);
    }
    for (int block = 0; block < blocks; ++block) {
      AddBlock<kLayout, kRows>(p, codes, scales + block * kTileColumns, left, block);
    }
  }
}

template <Layout kLayout>
MX_INLINE void MultiplyCodesRows(const CodesProduct& p) {
  if (p.rows == 1) return MultiplyCodesOf<kLayout, 1>(p);
  if (p.rows == 2) return MultiplyCodesOf<kLayout, 2>(p);
  if (p.rows == 4) return MultiplyCodesOf<kLayout, 4>(p);
  MultiplyCodesOf<kLayout, 8>(p);
}

void MultiplyCodes(const CodesProduct& p) {
  if (p.element == kE2M1) return MultiplyCodesRows<kPanels4>(p);
  if (p.element == kE2M3 || p.element == kE3M2) return MultiplyCodesRows<kPanels6>(p);
  MultiplyCodesRows<kPanels8>(p);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
