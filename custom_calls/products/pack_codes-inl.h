// Codes as they come to panels of codes (weights.h). Whichever set fetches them, what follows are
// loops that compilers make vectors of.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_INL_H_

#include <stdint.h>
#include <string.h>

#include "common/target.h"
#include "products/kernels.h"
#include "products/weights.h"
#if MX_RANK >= MX_RANK_avx512
#include "products/pack_avx512-inl.h"
#elif MX_RANK >= MX_RANK_avx2
#include "products/pack_avx2-inl.h"
#endif

namespace mx::MX_TARGET {
namespace {

// Words of 4 codes, consecutive along k, of as many rows as a set fetches at once.
constexpr int kRowsAtOnce = MX_RANK >= MX_RANK_avx512 ? 16 : MX_RANK >= MX_RANK_avx2 ? 8 : 4;
typedef uint32_t Words __attribute__((vector_size(4 * kRowsAtOnce)));
constexpr int kChunkWords = kChunk / 4, kParts = kTileColumns / kRowsAtOnce;

// Those of a chunk; 0 beyond the ends.
struct ChunkOfCodes {
  alignas(64) Words words[kParts][kChunkWords];
};

MX_INLINE void LoadChunk(const Source& source, int64_t first_row, int64_t chunk, ChunkOfCodes* to) {
#if MX_RANK >= MX_RANK_avx512
  ChunkCodes(source, first_row, chunk, (__m512i*)to->words[0], (__m512i*)to->words[1]);
#elif MX_RANK >= MX_RANK_avx2
  for (int part = 0; part < kParts; ++part) {
    const int64_t row = first_row + part * kRowsAtOnce;
    ChunkCodes(source, row, chunk * kChunk, source.rows - row, source.k - chunk * kChunk,
               (__m256i*)to->words[part]);
  }
#else
  memset(to, 0, sizeof *to);
  const int64_t first = chunk * kChunk;
  for (int64_t row = 0; row < kTileColumns && first_row + row < source.rows; ++row) {
    const uint8_t* from = (const uint8_t*)source.elements + (first_row + row) * source.row_stride;
    for (int64_t k = first; k < first + kChunk && k < source.k; ++k) {
      uint8_t* words = (uint8_t*)&to->words[row / kRowsAtOnce][(k - first) / 4];
      words[row % kRowsAtOnce * 4 + k % 4] = from[k * source.k_stride];
    }
  }
#endif
}

// Lays out a chunk, without what its bytes have beyond codes: but for codes of 8 bits, the last word of
// two or of four lies in the upper bits of the others.
template <Layout kLayout>
MX_INLINE void StoreChunk(const ChunkOfCodes& chunk, uint8_t* out) {
  constexpr int kTogether = kLayout == kPanels8 ? 1 : kLayout == kPanels4 ? 2 : 4;
  constexpr int kWords = kLayout == kPanels8 ? 1 : kTogether - 1;
  constexpr uint32_t kBits = kLayout == kPanels8 ? ~0u : kLayout == kPanels4 ? 0x0f0f0f0f : 0x3f3f3f3f;
  Words* to = (Words*)out;
#pragma GCC unroll 8
  for (int g = 0; g < kChunkWords; g += kTogether) {
#pragma GCC unroll 4
    for (int word = 0; word < kWords; ++word) {
      const int shift = kLayout == kPanels4 ? 4 : 6 - 2 * word;
      for (const Words(&part)[kChunkWords] : chunk.words) {
        *to++ = (part[g + word] & kBits) | (part[g + kTogether - 1] << shift & ~kBits);
      }
    }
  }
}

void PackCodes(const Source& source, int64_t first_row, uint8_t* out) {
  const WeightSizes sizes = SizesOfWeights(source.element, source.block, source.rows, source.k);
  const Source packed = PackedSource(source, out);
  const bool is_float8 = source.element <= kE5M2;
  const uint8_t top = source.element == kE4M3 ? 0x7f : 0x7c;  // of NaN and Inf
  const uint8_t fractions = source.element == kE4M3 ? 7 : 3;  // subnormal magnitudes
  const int shift = SummaryShift((source.k + kChunk - 1) / kChunk);
  PanelSummary summary = {};
  summary.mark = kPanelMark;
  for (int64_t chunk = 0; chunk < sizes.records * kRecordChunks; ++chunk) {
    ChunkOfCodes codes;
    LoadChunk(source, first_row, chunk, &codes);
    uint8_t special = 0, subnormal = 0;
    for (size_t i = 0; is_float8 && i < sizeof codes.words; ++i) {
      const uint8_t code = ((const uint8_t*)codes.words)[i];
      special |= (code & top) == top;
      subnormal |= (uint8_t)((code & 0x7f) - 1) < fractions;
    }
    summary.special |= special;
    const int64_t bit = chunk >> shift;
    summary.subnormal[bit / 8] |= (uint8_t)(subnormal << bit % 8);
    uint8_t* to = const_cast<uint8_t*>(CodesAt(packed, 0, chunk));
    if (packed.layout == kPanels4) StoreChunk<kPanels4>(codes, to);
    else if (packed.layout == kPanels6) StoreChunk<kPanels6>(codes, to);
    else StoreChunk<kPanels8>(codes, to);
  }
  const int64_t blocks = sizes.records * kRecordChunks * (kChunk / source.block);
  uint8_t low[kTileColumns], high[kTileColumns];
  memset(low, source.scale_kind == kScaleE8M0 ? 127 : 0x38, sizeof low);
  memcpy(high, low, sizeof high);
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* scales = const_cast<uint8_t*>(ScalesAt(packed, 0, block));
    LoadScaleBytes(source, first_row, block, kTileColumns, scales);
    for (int i = 0; i < kTileColumns; ++i) {
      low[i] = scales[i] < low[i] ? scales[i] : low[i];
      high[i] = scales[i] > high[i] ? scales[i] : high[i];
    }
  }
  summary.low = low[0], summary.high = high[0];
  for (int i = 1; i < kTileColumns; ++i) {
    summary.low = low[i] < summary.low ? low[i] : summary.low;
    summary.high = high[i] > summary.high ? high[i] : summary.high;
  }
  summary.special |= source.scale_kind == kScaleE4M3 && summary.high >= 0x7f;
  memcpy(out, &summary, sizeof summary);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_CODES_INL_H_
