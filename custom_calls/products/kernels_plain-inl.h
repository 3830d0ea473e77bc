// The kernels of kernels.h in plain C++: float32 panels and int8 ones.
// Sums of a block of integers stay below 2^24, so they are exact in float32 too.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_PLAIN_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_PLAIN_INL_H_

#include <stdint.h>
#include <string.h>

#include "common/float_types.h"
#include "common/target.h"
#include "products/kernels.h"
#include "products/weights.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace mx::MX_TARGET {
namespace {

constexpr int R = kTileRows;
constexpr int C = kTileColumns;

// -------------------------------------------------------------------------------------- packing

template <PanelType kType>
struct Numbers {
  using Type = float;
  static const float* Of(Element element) { return TablesOf(element).float32; }
};
template <>
struct Numbers<kInt8> {
  using Type = int8_t;
  static const int8_t* Of(Element element) { return TablesOf(element).int8; }
};

template <class Number>
MX_INLINE Number Value(const Source& source, const Number* table, int64_t at) {
  switch (source.element) {
    case kElementFloat32:
      return (Number)((const float*)source.elements)[at];
    case kElementBf16:
      return (Number)Widen(((const Bf16*)source.elements)[at]);
    case kElementF16:
      return (Number)Widen(((const F16*)source.elements)[at]);
    default:
      return table[((const uint8_t*)source.elements)[at]];
  }
}

// Values at position k of a chunk, of the first `rows` rows of a panel.
template <class Number>
MX_INLINE void PanelValues(Layout layout, const uint8_t* codes, const Number* table, int64_t k,
                           int rows, Number* values) {
  constexpr int kWord = C * 4;  // bytes of one word of each row
  if (layout == kPanels6) {
    const uint8_t* from = codes + k / 16 * 3 * kWord + k % 4;
    if (k % 16 < 12) {
      from += k % 16 / 4 * kWord;
      for (int i = 0; i < rows; ++i) values[i] = table[from[4 * i] & 63];
      return;
    }
    for (int i = 0; i < rows; ++i, from += 4) {
      values[i] = table[from[0] >> 6 | from[kWord] >> 6 << 2 | from[2 * kWord] >> 6 << 4];
    }
    return;
  }
  const bool nibbles = layout == kPanels4;
  const uint8_t* from = codes + (nibbles ? k / 8 : k / 4) * kWord + k % 4;
  const int shift = nibbles && k % 8 >= 4 ? 4 : 0, mask = nibbles ? 15 : 255;
  for (int i = 0; i < rows; ++i) values[i] = table[from[4 * i] >> shift & mask];
}

// The scales of a block of `width` rows of a panel.
template <PanelType kType>
MX_INLINE void PackScales(const Source& source, int64_t first_row, int64_t block, int width,
                          float* scales, ScaleRange* range) {
  const float* scale_table = ScaleTable(source.scale_kind, source.element, kType);
  uint8_t bytes[C];
  LoadScaleBytes(source, first_row, block, width, bytes);
  uint8_t low = bytes[0], high = bytes[0];
  for (int i = 0; i < C; ++i) {
    low = bytes[i] < low ? bytes[i] : low, high = bytes[i] > high ? bytes[i] : high;
  }
  if (low - 127 < range->low) range->low = low - 127;
  const int highest = high == 255 ? 1000 : high - 127;
  if (highest > range->high) range->high = highest;
  for (int i = 0; i < width; ++i) scales[i] = scale_table[bytes[i]];
}

#if MX_RANK < MX_RANK_avx2
// One panel of kRows rows.
template <PanelType kType, int kRows, bool kLhs>
MX_INLINE void PackPanel(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  using Number = typename Numbers<kType>::Type;
  constexpr int kWord = kType == kInt8 ? 4 : 1;  // elements that lie together
  const Number* table =
      source.element <= kElementInt8 ? Numbers<kType>::Of(source.element) : nullptr;
  const int64_t num_chunks = (source.k + kChunk - 1) / kChunk;
  const int per_chunk = kChunk / source.block;
  const int64_t left = source.rows - first_row;
  const int rows = left < 0 ? 0 : left < kRows ? (int)left : kRows;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    float* scales = (float*)out;
    int32_t* corrections = (int32_t*)(scales + per_chunk * kRows);
    Number* elements = (Number*)(corrections + (kType == kInt8 && kLhs ? per_chunk * kRows : 0));
    out = (char*)(elements + kChunk * kRows);
    for (int s = 0; s < per_chunk; ++s) {
      PackScales<kType>(source, first_row, chunk * per_chunk + s, kRows, scales + s * kRows, range);
    }
    if (kType == kInt8 && kLhs) memset(corrections, 0, sizeof(int32_t) * per_chunk * kRows);
    for (int k = 0; k < kChunk; ++k) {
      const int64_t at = (chunk * kChunk + k) * source.k_stride + first_row * source.row_stride;
      const int count = chunk * kChunk + k < source.k ? rows : 0;
      Number values[kRows];
      if (source.layout != kStrided) {
        PanelValues(source.layout, CodesAt(source, first_row, chunk), table, k, count, values);
      } else {
        for (int i = 0; i < count; ++i) {
          values[i] = Value(source, table, at + i * source.row_stride);
        }
      }
      for (int i = count; i < kRows; ++i) values[i] = 0;
      Number* to = elements + k / kWord * kWord * kRows + k % kWord;
      for (int i = 0; i < kRows; ++i) {
        to[i * kWord] = (Number)(kType == kInt8 && !kLhs ? (int)values[i] + 128 : values[i]);
        if (kType == kInt8 && kLhs) {
          corrections[k / source.block * kRows + i] -= 128 * (int)values[i];
        }
      }
    }
  }
}

template <PanelType kType>
void PackLhs(const Source& source, int64_t first_row, char* out, int64_t stride,
             ScaleRange* range) {
  for (int panel = 0; panel < kLhsPanelsPerGroup; ++panel) {
    PackPanel<kType, R, true>(source, first_row + panel * R, out + panel * stride, range);
  }
}

template <PanelType kType>
void PackFew(const Source& source, int64_t first_row, int rows, char* out, ScaleRange* range) {
  if (rows == 1) return PackPanel<kType, 1, true>(source, first_row, out, range);
  if (rows == 2) return PackPanel<kType, 2, true>(source, first_row, out, range);
  if (rows == 4) return PackPanel<kType, 4, true>(source, first_row, out, range);
  PackPanel<kType, 8, true>(source, first_row, out, range);
}

template <PanelType kType>
void PackRhs(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  PackPanel<kType, C, false>(source, first_row, out, range);
}

// ---------------------------------------------------------------------------------- multiplying

// Columns whose sums stay in registers.
constexpr int kColumns = 8;

// sums[R][kColumns] of one block.
MX_INLINE void MultiplyBlock(int32_t block, const float* MX_RESTRICT lhs,
                             const float* MX_RESTRICT rhs, float* MX_RESTRICT sums) {
  float sum[R][kColumns];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns; ++j) sum[i][j] = 0.0f;
  }
  for (int k = 0; k < block; ++k) {
    for (int i = 0; i < R; ++i) {
#if defined(__aarch64__)
      for (int j = 0; j < kColumns; ++j) sum[i][j] = __builtin_fmaf(lhs[i], rhs[j], sum[i][j]);
#else
      for (int j = 0; j < kColumns; ++j) sum[i][j] += lhs[i] * rhs[j];
#endif
    }
    lhs += R;
    rhs += C;
  }
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns; ++j) sums[i * kColumns + j] = sum[i][j];
  }
}

#if defined(__ARM_FEATURE_DOTPROD)
// The same of int8 panels, which has no rounding: words of 4 elements, 128 added to those of rhs.
MX_INLINE void MultiplyBlock(int32_t block, const int8_t* MX_RESTRICT lhs,
                             const uint8_t* MX_RESTRICT rhs, float* MX_RESTRICT sums) {
  const uint8x16_t offset = vdupq_n_u8(128);
  int32x4_t sum[R][kColumns / 4];
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns / 4; ++j) sum[i][j] = vdupq_n_s32(0);
  }
  for (int word = 0; word < block / 4; ++word, lhs += 4 * R, rhs += 4 * C) {
    const int8x16_t first = vld1q_s8(lhs), last = vld1q_s8(lhs + 8);
    for (int j = 0; j < kColumns / 4; ++j) {
      const int8x16_t bytes = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(rhs + 16 * j), offset));
      sum[0][j] = vdotq_laneq_s32(sum[0][j], bytes, first, 0);
      sum[1][j] = vdotq_laneq_s32(sum[1][j], bytes, first, 1);
      sum[2][j] = vdotq_laneq_s32(sum[2][j], bytes, first, 2);
      sum[3][j] = vdotq_laneq_s32(sum[3][j], bytes, first, 3);
      sum[4][j] = vdotq_laneq_s32(sum[4][j], bytes, last, 2);
      sum[5][j] = vdotq_laneq_s32(sum[5][j], bytes, last, 3);
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int j = 0; j < kColumns / 4; ++j) {
      vst1q_f32(sums + i * kColumns + 4 * j, vcvtq_f32_s32(sum[i][j]));
    }
  }
}
#endif

template <PanelType kType>
void Multiply(const PanelProduct& p) {
  using Number = typename Numbers<kType>::Type;
  const int32_t block = p.block;
  const Scaling scaling = p.scaling;
  const char* lhs = p.lhs;
  const char* rhs = p.rhs;
  float* tile = p.tile;
  const int per_chunk = kChunk / block;
  if (p.clear) memset(tile, 0, sizeof(float) * R * C);
  for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
    const float* left = (const float*)lhs;
    const float* right = (const float*)rhs;
    // A sum of signed bytes needs no correction.
    const Number* rows = (const Number*)(left + per_chunk * R * (kType == kInt8 ? 2 : 1));
    const Number* columns = (const Number*)(right + per_chunk * C);
    for (int s = 0; s < per_chunk; ++s) {
      for (int from = 0; from < C; from += kColumns) {
        float sums[R * kColumns];
        if constexpr (kType == kInt8) {
          MultiplyBlock(block, rows, (const uint8_t*)columns + 4 * from, sums);
        } else {
          MultiplyBlock(block, rows, columns + from, sums);
        }
        for (int i = 0; i < R; ++i) {
          float* total = tile + i * C + from;
          for (int j = 0; j < kColumns; ++j) {
            const float sum = sums[i * kColumns + j];
            if (scaling == kWide) {
              // Neither scale nor their product need be float32, only what they make of the sum.
              total[j] += (float)((double)sum * (double)left[i] * (double)right[from + j]);
            } else {
              total[j] += sum * (left[i] * right[from + j]);
            }
          }
        }
      }
      left += R, right += C;
      rows += block * R, columns += block * C;
    }
    lhs += ChunkBytes(kType, block, R, true);
    rhs += ChunkBytes(kType, block, C, false);
  }
}

#endif  // MX_RANK < MX_RANK_avx2

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_PLAIN_INL_H_
