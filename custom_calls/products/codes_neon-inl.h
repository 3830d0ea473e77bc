// What codes_rows-inl.h takes of every AArch64 processor.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_NEON_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_NEON_INL_H_

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "products/kernels.h"
#include "products/weights.h"

namespace mx::MX_TARGET {
namespace {

// Word `word` of a chunk, of 4 rows: its codes are in the bits that the format has, above those is
// anything.
template <Layout kLayout>
MX_INLINE uint8x16_t LoadWord(const uint8_t* codes, int word) {
  constexpr int kStep = kTileColumns * 4;
  if (kLayout != kPanels6) return vld1q_u8(codes + word * kStep);
  const uint8_t* first = codes + word / 4 * 3 * kStep;
  if (word % 4 < 3) return vld1q_u8(first + word % 4 * kStep);
  const uint8x16_t low = vshrq_n_u8(vld1q_u8(first), 6);
  const uint8x16_t middle = vsliq_n_u8(low, vshrq_n_u8(vld1q_u8(first + kStep), 6), 2);
  return vsliq_n_u8(middle, vshrq_n_u8(vld1q_u8(first + 2 * kStep), 6), 4);
}

// Words of 4 codes of a chunk's block, of 4 rows.
template <Element kElement>
MX_INLINE uint8x16_t LoadCodes(const uint8_t* codes, int word) {
  if (kElement != kE2M1) return LoadWord<LayoutOf(kElement)>(codes, word);
  const uint8x16_t both = LoadWord<kPanels4>(codes, word / 2);
  return word % 2 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
}

template <Element kElement>
MX_INLINE int8x16_t Integers(const int8x16x4_t& table, uint8x16_t codes) {
  if (kElement == kElementInt8) return vreinterpretq_s8_u8(codes);
  if (kElement == kE2M1) return vqtbl1q_s8(table.val[0], codes);
  return vqtbl4q_s8(table, vandq_u8(codes, vdupq_n_u8(63)));
}

// Where a look-up of 16 bytes finds byte `byte` of 4 words, as the upper bytes of words of `size`
// bytes; what it does not find is 0.
MX_INLINE uint8x16_t PlacesOf(int byte, int size) {
  uint8_t places[16];
  for (int i = 0; i < 16; ++i) {
    places[i] = i % size == size - 1 && i / size < 4 ? (uint8_t)(4 * (i / size) + byte) : 255;
  }
  return vld1q_u8(places);
}

// Values of a word's 4 codes, of 4 rows, as float32.
template <Element kElement>
MX_INLINE void Decode(const int8x16x4_t& table, uint8x16_t codes, float32x4_t* values) {
  if constexpr (FitsInt8(kElement)) {
    constexpr int kFraction = 24 + UnitShift(kElement);
    const int8x16_t integers = Integers<kElement>(table, codes);
    for (int i = 0; i < 4; ++i) {
      const int32x4_t top = vreinterpretq_s32_s8(vqtbl1q_s8(integers, PlacesOf(i, 4)));
      values[i] = vcvtq_n_f32_s32(top, kFraction);
    }
  } else {
    // As halves, which are these floats, subnormal or not, but for a power of two.
    constexpr float kFactor = kElement == kE4M3 ? 0x1p8f : kElement == kE3M2 ? 0x1p12f : 1.0f;
    uint8x16_t upper = codes, lower = vdupq_n_u8(0);
    if (kElement == kE3M2) {
      upper = vbslq_u8(vdupq_n_u8(0x80), vshlq_n_u8(codes, 2), vandq_u8(codes, vdupq_n_u8(31)));
    } else if (kElement == kE4M3) {
      const uint8x16_t magnitude = vandq_u8(codes, vdupq_n_u8(0x7f));
      upper = vbslq_u8(vdupq_n_u8(0x80), codes, vshrq_n_u8(magnitude, 1));
      lower = vshlq_n_u8(codes, 7);
    }
    for (int i = 0; i < 4; ++i) {
      uint16x8_t halves = vreinterpretq_u16_u8(vqtbl1q_u8(upper, PlacesOf(i, 2)));
      if (kElement == kE4M3) {
        const uint16x8_t rest = vreinterpretq_u16_u8(vqtbl1q_u8(lower, PlacesOf(i, 2)));
        halves = vorrq_u16(halves, vshrq_n_u16(rest, 8));
      }
      values[i] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves)));
      if (kElement != kE5M2) values[i] = vmulq_n_f32(values[i], kFactor);
    }
  }
}

// Sums of a block of kWords words by kRows rows, of 4 columns. `values`: kRows of each position.
template <Element kElement, int kWords, int kRows>
MX_INLINE void SumFloats(const int8x16x4_t& table, const uint8_t* codes, int first,
                         const float* values, float32x4_t* sum) {
  for (int i = 0; i < kRows; ++i) sum[i] = vdupq_n_f32(0);
  for (int w = 0; w < kWords; ++w, values += 4 * kRows) {
    float32x4_t decoded[4];
    Decode<kElement>(table, LoadCodes<kElement>(codes, first + w), decoded);
    for (int c = 0; c < 4; ++c) {
      for (int i = 0; i < kRows; ++i) {
        sum[i] = vfmaq_n_f32(sum[i], decoded[c], values[c * kRows + i]);
      }
    }
  }
}

// The same of integers, exact. `rows`: words of 4 elements of kRows rows.
#if defined(__ARM_FEATURE_DOTPROD)
template <Element kElement, int kWords, int kRows>
MX_INLINE void SumIntegers(const int8x16x4_t& table, const uint8_t* codes, int first,
                           const int8x16_t (&rows)[kWords * kRows / 4], float32x4_t* sum) {
  int8x16_t integers[kWords];
  for (int w = 0; w < kWords; ++w) {
    integers[w] = Integers<kElement>(table, LoadCodes<kElement>(codes, first + w));
  }
  int32x4_t total[kRows];
  for (int i = 0; i < kRows; ++i) total[i] = vdupq_n_s32(0);
  // Word w of row i is number w * kRows + i.
  const auto add = [&](int number, auto dot) {
    int32x4_t* to = total + number % kRows;
    *to = dot(*to, integers[number / kRows], rows[number / 4]);
  };
#pragma GCC unroll 16
  for (int at = 0; at < kWords * kRows; at += 4) {
    add(at, [](auto sum, auto x, auto y) { return vdotq_laneq_s32(sum, x, y, 0); });
    add(at + 1, [](auto sum, auto x, auto y) { return vdotq_laneq_s32(sum, x, y, 1); });
    add(at + 2, [](auto sum, auto x, auto y) { return vdotq_laneq_s32(sum, x, y, 2); });
    add(at + 3, [](auto sum, auto x, auto y) { return vdotq_laneq_s32(sum, x, y, 3); });
  }
  for (int i = 0; i < kRows; ++i) sum[i] = vcvtq_f32_s32(total[i]);
}
#endif

// 4 tame scales times the elements' own factor, from a table of 256.
MX_INLINE float32x4_t TameScales(ScaleKind kind, const uint8_t* bytes, float unit) {
  uint32_t four;
  memcpy(&four, bytes, sizeof four);
  const uint8x8_t eight = vreinterpret_u8_u32(vdup_n_u32(four));
  const uint16x8_t wide = vmovl_u8(eight);
  if (kind == kScaleE8M0) {
    const uint32x4_t bits = vshlq_n_u32(vmovl_u16(vget_low_u16(wide)), 23);
    return vmulq_n_f32(vreinterpretq_f32_u32(bits), unit);
  }
  const uint16x4_t halves = vget_low_u16(vshlq_n_u16(wide, 7));
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)), 0x1p8f * unit);
}

template <Element kElement>
struct CodeTable {
  int8x16x4_t integers;

  CodeTable() { integers = vld1q_s8_x4(TablesOf(kElement).int8); }
};

template <PanelType kType, Element kElement, int kBlocks, int kRows, bool kLifted>
MX_INLINE void AddChunk(const CodesProduct& p, const CodeTable<kElement>& table,
                        const uint8_t* codes, const uint8_t* scales, const char* left, float unit) {
  constexpr int kBlock = kChunk / kBlocks, kWords = kBlock / 4;
  constexpr int kBehind = kType == kInt8 ? 2 * kBlocks * kRows : kBlocks * kRows;  // scales
  const float* mine = (const float*)left;
  const ScaleKind kind = p.scale_kind;
  float* const tile = p.tile;
  for (int block = 0; block < kBlocks; ++block) {
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t rows[kWords * kRows / 4];
    for (int i = 0; i < kWords * kRows / 4; ++i) {
      rows[i] = vld1q_s8((const int8_t*)(mine + kBehind + block * kWords * kRows) + 16 * i);
    }
#endif
    for (int column = 0; column < kTileColumns; column += 4) {
      float32x4_t sum[kRows];
      if constexpr (kType == kFloat32) {
        SumFloats<kElement, kWords, kRows>(table.integers, codes + 4 * column, block * kWords,
                                           mine + kBehind + block * kBlock * kRows, sum);
      }
#if defined(__ARM_FEATURE_DOTPROD)
      if constexpr (kType == kInt8) {
        SumIntegers<kElement, kWords, kRows>(table.integers, codes + 4 * column, block * kWords, rows,
                                             sum);
      }
#endif
      const float32x4_t right =
          TameScales(kind, scales + block * kTileColumns + column, unit);
      for (int i = 0; i < kRows; ++i) {
        float* total = tile + i * kTileColumns + column;
        const float32x4_t factor = vmulq_n_f32(right, mine[block * kRows + i]);
        vst1q_f32(total, vaddq_f32(vld1q_f32(total), vmulq_f32(sum[i], factor)));
      }
    }
  }
}

// Halves hold subnormal floats of 8 bits too.
constexpr bool kLifts = false;

MX_INLINE void PrefetchAhead(const uint8_t* line) { __builtin_prefetch(line + 2048); }

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_NEON_INL_H_
