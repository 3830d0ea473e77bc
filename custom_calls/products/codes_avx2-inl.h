// What codes_rows-inl.h takes of AVX2.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_

#include "products/multiply_vectors-inl.h"

namespace mx::MX_TARGET {
namespace {

// Columns at a time, in registers of 8: as many as there are registers for their sums, of which
// integers have two.
constexpr int GroupsOf(PanelType type, int rows) {
  return rows > 4 ? 1 : type == kInt8 ? 4 / rows : rows > 2 ? 2 : 4;
}

// Sums of a block by kRows rows, whose elements are `values`. `corrections` are -128 times the sums of
// those.
template <PanelType kType, Element kElement, int kBlocks, int kRows, bool kLifted, bool kFolded>
MX_INLINE void SumBlock(const CodeTable<kElement>& table, const uint8_t* codes, int block,
                        const int32_t* corrections, const int32_t* values,
                        __m256 (&sum)[kRows][GroupsOf(kType, kRows)]) {
  constexpr int kGroups = GroupsOf(kType, kRows), kEach = (int)BytesPerElement(kType);
  constexpr int kHalves = kElement == kE2M1 ? 2 : 1, kWords = kChunk / kBlocks / (4 * kHalves);
  // A pair of products is at most 2 * 24 * 128 in E2M1, so four of them are an int16.
  constexpr int kPairs = kType != kInt8 || MX_RANK > MX_RANK_avx2 ? 0 : kElement == kE2M1 ? 4 : 1;
  const __m256i offset = _mm256_set1_epi8((char)(kType == kInt8 ? OffsetOf(kElement) : 0));
  CodeTable<kElement> moved = table;
  if (kElement == kE2M1) moved.low = _mm256_add_epi8(table.low, offset);
  __m256i total[kRows][kGroups], pairs[kRows][kGroups];
  for (int i = 0; i < kRows; ++i) {
    const int begin = kType == kInt8 ? (corrections[i] >> 7) * OffsetOf(kElement) : 0;
    for (int j = 0; j < kGroups; ++j) total[i][j] = _mm256_set1_epi32(begin);
  }
  MX_UNROLL
  for (int w = 0; w < kWords * kHalves; ++w, values += kEach * kRows) {
    MX_UNROLL
    for (int j = 0; j < kGroups; ++j) {
      const __m256i word = LoadWord<LayoutOf(kElement)>(codes + 4 * kLanes * j,
                                                        block * kWords + w / kHalves);
      __m256i each[kEach];
      Expand<kType, kLifted, kFolded>(moved, w % kHalves ? _mm256_srli_epi16(word, 4) : word, each);
      if (kType == kInt8 && kElement != kE2M1) each[0] = _mm256_add_epi8(each[0], offset);
      MX_UNROLL
      for (int c = 0; c < kEach; ++c) {
        MX_UNROLL
        for (int i = 0; i < kRows; ++i) {
          AddWord<kType, kPairs>(w, &pairs[i][j], &total[i][j], each[c],
                                 _mm256_set1_epi32(values[c * kRows + i]));
        }
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kGroups; ++j) sum[i][j] = AsFloat<kType>(total[i][j]);
  }
}

// 8 tame scales times `unit`, a power of two.
MX_INLINE __m256 TameScales(ScaleKind kind, const uint8_t* bytes, float unit) {
  const __m128i eight = _mm_loadl_epi64((const __m128i*)bytes);
  if (kind == kScaleE8M0) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight), 23);
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(unit));
  }
  // A half with the code's bits is it, subnormal or not, but for a power of two.
  const __m128i halves = _mm_slli_epi16(_mm_cvtepu8_epi16(eight), 7);
  return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(0x1p8f * unit));
}

template <PanelType kType, Element kElement, int kBlocks, int kRows, bool kLifted, bool kFolded>
MX_INLINE void AddChunkOf(const CodesProduct& p, const CodeTable<kElement>& table,
                          const uint8_t* codes, const uint8_t* scales, const char* left,
                          float unit) {
  constexpr int kGroups = GroupsOf(kType, kRows), kBlock = kChunk / kBlocks;
  constexpr int kWords = kBlock * (int)BytesPerElement(kType) / 4;  // of a block
  const float* mine = (const float*)left;
  const int32_t* corrections = (const int32_t*)left + kBlocks * kRows;
  const int32_t* values = corrections + (kType == kInt8 ? kBlocks * kRows : 0);
  if (kFolded) unit *= BiasFactor(kElement, kLifted) / kFoldLhs;
  for (int block = 0; block < kBlocks; ++block) {
    for (int column = 0; column < kTileColumns; column += kLanes * kGroups) {
      __m256 sum[kRows][kGroups];
      SumBlock<kType, kElement, kBlocks, kRows, kLifted, kFolded>(
          table, codes + 4 * column, block, corrections + block * kRows,
          values + block * kWords * kRows, sum);
      for (int j = 0; j < kGroups; ++j) {
        const int at = column + kLanes * j;
        const __m256 right = TameScales(p.scale_kind, scales + block * kTileColumns + at, unit);
        for (int i = 0; i < kRows; ++i) {
          float* total = p.tile + i * kTileColumns + at;
          const __m256 factor = _mm256_mul_ps(_mm256_broadcast_ss(mine + block * kRows + i), right);
          _mm256_store_ps(total, _mm256_fmadd_ps(sum[i][j], factor, _mm256_load_ps(total)));
        }
      }
    }
  }
}

template <PanelType kType, Element kElement, int kBlocks, int kRows, bool kLifted>
MX_INLINE void AddChunk(const CodesProduct& p, const CodeTable<kElement>& table,
                        const uint8_t* codes, const uint8_t* scales, const char* left, float unit) {
  constexpr bool kMayFold = kType == kFloat32 && BiasFactor(kElement, kLifted) != 1.0f;
  if (kMayFold && p.folded) {
    AddChunkOf<kType, kElement, kBlocks, kRows, kLifted, kMayFold>(p, table, codes, scales, left,
                                                                   unit);
  } else {
    AddChunkOf<kType, kElement, kBlocks, kRows, kLifted, false>(p, table, codes, scales, left, unit);
  }
}

// Where some floats of 8 bits are subnormal, they are decoded in another way.
constexpr bool kLifts = true;

// Into the second level of the cache, as the hardware's prefetchers stop at pages, and into the first.
MX_INLINE void PrefetchAhead(const uint8_t* line) {
  _mm_prefetch((const char*)line + (12 << 10), _MM_HINT_T1);
  _mm_prefetch((const char*)line + (6 << 10), _MM_HINT_T0);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
