// Packed panels of codes (weights.h) by the first few of many rows, with AVX-512: decoded on their
// way, which leaves the multipliers busy, and kept for the rows that follow. Adds in the order in
// which an unpacked panel is added, so the bits are the same.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_KEEP_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_KEEP_AVX512_INL_H_

#include <immintrin.h>

#include "products/codes_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

// Decodes a register of codes of each half of a panel, `word` from `codes` on, and keeps the words.
template <PanelType kType, Coding kCoding, int kWords>
MX_INLINE void DecodeAndKeep(const CodeTable& table, const char* codes, int word, char* keep,
                             __m512i (&decoded)[2][kWords]) {
  MX_UNROLL
  for (int j = 0; j < 2; ++j) {
    const char* from = codes + 64 * j;
    if (HasLine(kCoding, word)) {
      _mm_prefetch(from + BytesOfWords(kCoding, word) + kPrefetchBytes, _MM_HINT_T0);
    }
    DecodeWords<kType, kCoding, false, false>(table, LoadWord<kCoding>(from, word), decoded[j]);
    MX_UNROLL
    for (int w = 0; w < kWords; ++w) _mm512_store_si512(keep + 64 * (2 * w + j), decoded[j][w]);
  }
}

// A block's 32 scales, as AddScaled wants them; kept as pack_rhs gives them.
template <Scaling kScaling>
MX_INLINE void LoadAndKeepScales(const uint8_t* bytes, float factor, char* keep,
                                 __m512 (&scale)[2]) {
  const __m512i bias = _mm512_set1_epi32(127 << 23);
  MX_UNROLL
  for (int j = 0; j < 2; ++j) {
    scale[j] = TameScales(kScaling == kNormal ? kScaleE8M0 : kScaleE4M3, bytes + 16 * j, factor);
    const __m512i bits = _mm512_castps_si512(scale[j]);
    _mm512_store_si512(keep + 64 * j, kScaling == kNormal ? _mm512_add_epi32(bits, bias) : bits);
  }
}

template <PanelType kType, Coding kCoding, int kBlocks, Scaling kScaling>
void MultiplyKeepingOf(const CodesProduct& p, char* MX_RESTRICT keep) {
  constexpr int kCodes = CodesPerWord(kCoding);
  constexpr int kWords = kCodes * (int)BytesPerElement(kType) / 4;
  constexpr int kGroups = kChunk / kCodes / kBlocks;  // of registers, in a block
  constexpr int kTurn = WordsPerTurn(kCoding);
  const CodeTable table = MakeCodeTable<kType, kCoding>(p.element);
  const float factor = ScaleTable(p.scale_kind, p.element, kType)[kScaling == kNormal ? 127 : 0x38];
  const char* lhs = p.lhs;
  const char* record = p.records;
  __m512 total[R][2];
  MX_UNROLL
  for (int i = 0; i < 2 * R; ++i) {
    total[i / 2][i % 2] = p.clear ? _mm512_setzero_ps() : _mm512_load_ps(p.tile + 16 * i);
  }
  for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
    const float* lhs_scales = (const float*)lhs;
    const int32_t* corrections = (const int32_t*)(lhs + kBlocks * R * 4);
    const int32_t* words = (const int32_t*)(lhs + kBlocks * R * (kType == kInt8 ? 8 : 4));
    char* columns = keep + kBlocks * C * 4;
    // The second chunk of a record lies behind the first.
    const int64_t second = chunk % kRecordChunks;
    const uint8_t* scales = (const uint8_t*)record + second * kBlocks * C;
    const char* codes = record + RecordScaleBytes(kChunk / kBlocks) +
                        second * BytesOfWords(kCoding, kChunk / kCodes);
    if (second) record += RecordBytesOf<kCoding>(kChunk / kBlocks);
    MX_UNROLL
    for (int s = 0; s < kBlocks; ++s) {
      __m512i sum[R][2];
      MX_UNROLL
      for (int i = 0; i < R; ++i) {
        sum[i][0] = sum[i][1] =
            kType == kInt8 ? _mm512_set1_epi32(corrections[s * R + i]) : _mm512_setzero_si512();
      }
      MX_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        __m512i decoded[2][kWords];
        DecodeAndKeep<kType, kCoding>(table, codes, g % kTurn, columns, decoded);
        if (g % kTurn == kTurn - 1) codes += BytesOfWords(kCoding, kTurn);
        MX_UNROLL
        for (int w = 0; w < kWords; ++w) {
          MX_UNROLL
          for (int i = 0; i < R; ++i) {
            const __m512i word = _mm512_set1_epi32(words[i]);
            sum[i][0] = MultiplyAdd<kType>(sum[i][0], decoded[0][w], word);
            sum[i][1] = MultiplyAdd<kType>(sum[i][1], decoded[1][w], word);
          }
          words += R;
        }
        columns += kWords * C * 4;
      }
      __m512 scale[2];
      LoadAndKeepScales<kScaling>(scales, factor, keep + s * C * 4, scale);
      scales += C;
      MX_UNROLL
      for (int i = 0; i < R; ++i) {
        const float mine = lhs_scales[s * R + i];
        total[i][0] = AddScaled<kScaling>(total[i][0], AsFloat<kType>(sum[i][0]), scale[0], mine);
        total[i][1] = AddScaled<kScaling>(total[i][1], AsFloat<kType>(sum[i][1]), scale[1], mine);
      }
    }
    lhs = (const char*)words;
    keep = columns;
  }
  MX_UNROLL
  for (int i = 0; i < 2 * R; ++i) _mm512_store_ps(p.tile + 16 * i, total[i / 2][i % 2]);
}

template <PanelType kType, Coding kCoding>
MX_INLINE void MultiplyKeepingAs(const CodesProduct& p, char* keep) {
  if (p.block == kChunk) {
    p.scale_kind == kScaleE8M0 ? MultiplyKeepingOf<kType, kCoding, 1, kNormal>(p, keep)
                               : MultiplyKeepingOf<kType, kCoding, 1, kProduct>(p, keep);
  } else {
    p.scale_kind == kScaleE8M0 ? MultiplyKeepingOf<kType, kCoding, 2, kNormal>(p, keep)
                               : MultiplyKeepingOf<kType, kCoding, 2, kProduct>(p, keep);
  }
}

template <PanelType kType>
void MultiplyKeeping(const CodesProduct& p, char* keep) {
  ByElement(p.element, [&p, keep](auto element) {
    constexpr Element kElement = decltype(element)::value;
    if constexpr (kType != kInt8 || FitsInt8(kElement)) {
      MultiplyKeepingAs<kType, CodingOf(kElement)>(p, keep);
    }
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_KEEP_AVX512_INL_H_
