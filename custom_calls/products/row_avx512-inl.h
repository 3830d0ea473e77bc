// One row by panels of codes (weights.h), decoded on their way, with AVX-512. Adds in the order in
// which an unpacked panel is added, so the bits are the same.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_AVX512_INL_H_

#include <immintrin.h>

#include "products/codes_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

// Panels follow each other, so what comes next lies ahead; hardware prefetchers stop at pages. Every
// line is fetched from the one that lies as far before it, be it of codes, scales or a summary.
// Measured on Zen 5: from 9 to 24 KiB are alike, 8 KiB takes a twelfth longer, none at all three
// times as long, and scales left out a sixth.
constexpr int64_t kRowAhead = 12 << 10;

// kTogether blocks from `block` on: sums of different blocks need not wait for each other, and one
// panel at a time is one stream of memory.
template <PanelType kType, Coding kCoding, int kBlocks, int kTogether, bool kFold, bool kLifted>
MX_INLINE void AddBlocks(const RowProduct& p, const CodeTable& table, const char* codes,
                         const uint8_t* scales, int64_t block, float unscaled,
                         __m512 (&total)[2]) {
  constexpr int kCodes = CodesPerWord(kCoding), kTurn = WordsPerTurn(kCoding);
  constexpr int kWords = kCodes * (int)BytesPerElement(kType) / 4;
  constexpr int kHalf = kCoding == kCode4 ? kWords / 2 : kWords;
  constexpr int kGroups = kChunk / kCodes / kBlocks;
  const int32_t* words = p.words + block * kGroups * kWords;
  codes += block * BytesOfWords(kCoding, kGroups);
  scales += block * C;
  __m512i sum[kTogether][2];
  MX_UNROLL
  for (int t = 0; t < kTogether; ++t) {
    sum[t][0] = sum[t][1] =
        kType == kInt8 ? _mm512_set1_epi32(p.corrections[block + t]) : _mm512_setzero_si512();
  }
  const auto add = [&](int g, int turn) {
    MX_UNROLL
    for (int t = 0; t < kTogether; ++t) {
      const char* from = codes + BytesOfWords(kCoding, t * kGroups + g);
      const int32_t* word = words + (t * kGroups + g + turn) * kWords;
      // Half of the words at a time, of both registers in turn: schedulers hold few instructions
      // that wait, and those of one sum wait for each other.
      MX_UNROLL
      for (int half = 0; half < kWords; half += kHalf) {
        __m512i decoded[2][kWords];
        MX_UNROLL
        for (int j = 0; j < 2; ++j) {
          if (half == 0 && HasLine(kCoding, turn)) {
            _mm_prefetch(from + BytesOfWords(kCoding, turn) + kRowAhead + 64 * j, _MM_HINT_T0);
          }
          DecodeWords<kType, kCoding, kFold, kLifted>(
              table, LoadWord<kCoding>(from + 64 * j, turn), decoded[j]);
        }
        MX_UNROLL
        for (int w = half; w < half + kHalf; ++w) {
          MX_UNROLL
          for (int j = 0; j < 2; ++j) {
            sum[t][j] = MultiplyAdd<kType>(sum[t][j], decoded[j][w], _mm512_set1_epi32(word[w]));
          }
        }
      }
    }
  };
  for (int g = 0; g < kGroups; g += kTurn) {
    for (int turn = 0; HasLine(kCoding, turn) && turn < kTurn; ++turn) add(g, turn);
    if (!HasLine(kCoding, kTurn - 1)) add(g, kTurn - 1);
  }
  const float factor = kFold ? BiasFactor(kCoding, kLifted) / kFoldLhs * unscaled : unscaled;
  MX_UNROLL
  for (int t = 0; t < kTogether; ++t) {
    if (t % 2 == 0) _mm_prefetch((const char*)scales + t * C + kRowAhead, _MM_HINT_T0);
    const float mine = p.lhs_scales[block + t];
    MX_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m512 scale = TameScales(p.scale_kind, scales + t * C + 16 * j, factor);
      const __m512 exact = AsFloat<kType>(sum[t][j]);
      total[j] = p.scale_kind == kScaleE8M0 ? AddScaled<kNormal>(total[j], exact, scale, mine)
                                            : AddScaled<kProduct>(total[j], exact, scale, mine);
    }
  }
}

// Whether one of the blocks' chunks has subnormal codes.
MX_INLINE bool HasSubnormals(const PanelSummary* summary, int64_t first, int64_t last, int shift) {
  for (int64_t bit = first >> shift; bit <= last >> shift; ++bit) {
    if (summary->subnormal[bit / 8] >> bit % 8 & 1) return true;
  }
  return false;
}

template <PanelType kType, Coding kCoding, int kBlocks, bool kFold>
void MultiplyRowOf(const RowProduct& p) {
  constexpr bool kMayLift = kType == kFloat32 && IsByteFloat(kCoding);
  // Chains of additions enough for the multipliers; few blocks where one may slow down all, and one
  // where decoding is so short that memory in its own order counts for more.
  constexpr bool kShort = kType == kInt8 && kCoding == kCode6 && kByteLookup;
  constexpr int kTogether = kMayLift ? 2 : kShort ? 1 : 4;
  const CodeTable table = MakeCodeTable<kType, kCoding>(p.element);
  const int64_t num_blocks = p.num_chunks * kBlocks;
  // What scale 1 stands for: the elements' own factor.
  const float unscaled = ScaleTable(p.scale_kind, p.element,
                                    kType)[p.scale_kind == kScaleE8M0 ? 127 : 0x38];
  const int shift = kMayLift ? SummaryShift(p.num_chunks) : 0;
  for (int panel = 0; panel < p.panels; ++panel) {
    const char* codes = p.codes + panel * p.panel_bytes;
    const uint8_t* scales = p.scales + panel * p.panel_bytes;
    const PanelSummary* summary =
        (const PanelSummary*)((const char*)p.summaries + panel * p.panel_bytes);
    _mm_prefetch((const char*)summary + kRowAhead, _MM_HINT_T0);
    __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t block = 0;
    for (; block + kTogether <= num_blocks; block += kTogether) {
      if (kMayLift && HasSubnormals(summary, block / kBlocks,
                                    (block + kTogether - 1) / kBlocks, shift)) {
        AddBlocks<kType, kCoding, kBlocks, kTogether, kFold, kMayLift>(p, table, codes, scales,
                                                                       block, unscaled, total);
      } else {
        AddBlocks<kType, kCoding, kBlocks, kTogether, kFold, false>(p, table, codes, scales, block,
                                                                    unscaled, total);
      }
    }
    for (; block < num_blocks; ++block) {
      if (kMayLift && HasSubnormals(summary, block / kBlocks, block / kBlocks, shift)) {
        AddBlocks<kType, kCoding, kBlocks, 1, kFold, kMayLift>(p, table, codes, scales, block,
                                                               unscaled, total);
      } else {
        AddBlocks<kType, kCoding, kBlocks, 1, kFold, false>(p, table, codes, scales, block,
                                                               unscaled, total);
      }
    }
    _mm512_store_ps(p.sums + panel * C, total[0]);
    _mm512_store_ps(p.sums + panel * C + 16, total[1]);
  }
}

template <PanelType kType, Coding kCoding>
MX_INLINE void MultiplyRowAs(const RowProduct& p) {
  if constexpr (kType == kFloat32 && IsByteFloat(kCoding)) {
    if (p.folded) {
      return p.block == kChunk ? MultiplyRowOf<kType, kCoding, 1, true>(p)
                               : MultiplyRowOf<kType, kCoding, 2, true>(p);
    }
  }
  p.block == kChunk ? MultiplyRowOf<kType, kCoding, 1, false>(p)
                    : MultiplyRowOf<kType, kCoding, 2, false>(p);
}

template <PanelType kType>
void MultiplyRow(const RowProduct& p) {
  if (p.element == kE2M1) return MultiplyRowAs<kType, kCode4>(p);
  if (p.element == kElementInt8) return MultiplyRowAs<kType, kCodeInt8>(p);
  if (p.element == kE2M3) return MultiplyRowAs<kType, kCode6>(p);
  if constexpr (kType != kInt8) {
    if (p.element == kE3M2) return MultiplyRowAs<kType, kCode6>(p);
    if (p.element == kE4M3) return MultiplyRowAs<kType, kCodeE4M3>(p);
    MultiplyRowAs<kType, kCodeE5M2>(p);
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_AVX512_INL_H_
