// Operands to panels, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX512_INL_H_

#include <immintrin.h>
#include <string.h>

#include "products/decode_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

constexpr int R = kTileRows;
constexpr int C = kTileColumns;
constexpr int kPrefetchBytes = 4096;

MX_INLINE void Transpose16x16(__m512i r[16]) {
  __m512i t[16];
  MX_UNROLL
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  MX_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  MX_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  MX_UNROLL
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// 32 pairs of 16-bit values to words of 16 rows each: value i of one, then of the other.
MX_INLINE void JoinWords(__m512i first, __m512i second, __m512i* low, __m512i* high) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i pairs = _mm512_add_epi32(_mm512_or_si512(lanes, _mm512_slli_epi32(lanes, 16)),
                                         _mm512_set1_epi32(32 << 16));
  *low = _mm512_permutex2var_epi16(first, pairs, second);
  *high = _mm512_permutex2var_epi16(
      first, _mm512_add_epi32(pairs, _mm512_set1_epi32(16 | 16 << 16)), second);
}

// 32 rows, of which words stand in two vectors, to the panels.
struct RhsWriter {
  char* out;
  int64_t chunk_bytes;

  __attribute__((always_inline)) inline void Row(int64_t chunk, int64_t offset, __m512i low,
                                                 __m512i high) const {
    char* to = out + chunk * chunk_bytes + offset * C * 4;
    _mm512_storeu_si512(to, low);
    _mm512_storeu_si512(to + 64, high);
  }
};

struct LhsWriter {
  char* out;
  int64_t chunk_bytes, stride;

  // Writes two words more than belong to it: words are written in ascending order, so what
  // follows overwrites them, and a panel ends with room for them.
  __attribute__((always_inline)) inline void Row(int64_t chunk, int64_t offset, __m512i low,
                                                 __m512i high) const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    char* to = out + chunk * chunk_bytes + offset * R * 4;
    MX_UNROLL
    for (int panel = 0; panel < kLhsPanelsPerGroup; ++panel) {
      const __m512i from = _mm512_add_epi32(lanes, _mm512_set1_epi32(panel * R));
      const __m512i mine = _mm512_permutex2var_epi32(low, from, high);
      _mm256_storeu_si256((__m256i*)(to + panel * stride), _mm512_castsi512_si256(mine));
    }
  }
};

// One panel of up to 16 rows of lhs; a row of it may write beyond its end, where the next one follows.
struct FewWriter {
  char* out;
  int64_t chunk_bytes;
  int rows;

  __attribute__((always_inline)) inline void Row(int64_t chunk, int64_t offset, __m512i low,
                                                 __m512i) const {
    char* to = out + chunk * chunk_bytes + offset * rows * 4;
    _mm512_storeu_si512(to, low);
  }
};

template <class Writer>
MX_INLINE void WriteScales(const Writer& writer, const Source& source, int64_t chunk,
                           const __m512 scales[2][2]) {
  for (int s = 0; s < kChunk / source.block; ++s) {
    writer.Row(chunk, s, _mm512_castps_si512(scales[s][0]), _mm512_castps_si512(scales[s][1]));
  }
}

struct ChunkSize {
  int k, rows;  // at most 32, none beyond the ends
};

MX_INLINE ChunkSize SizeOfChunk(const Source& source, int64_t first_row, int64_t chunk) {
  const int64_t k = source.k - chunk * kChunk, rows = source.rows - first_row;
  return {k < 0 ? 0 : k < 32 ? (int)k : 32, rows < 0 ? 0 : rows < 32 ? (int)rows : 32};
}

// The chunks that follow: whatever the prefetchers of the hardware do, they stop at pages.
MX_INLINE void PrefetchCodes(const char* words, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    _mm_prefetch(words + kPrefetchBytes + at, _MM_HINT_T0);
  }
}

// The words of a chunk of a panel.
template <Layout kLayout>
MX_INLINE void PanelCodes(const char* words, __m512i low[8], __m512i high[8]) {
  const __m512i mask = _mm512_set1_epi8(kLayout == kPanels4 ? 15 : 63);
  PrefetchCodes(words, PanelChunkBytes(kLayout));
  MX_UNROLL
  for (int g = 0; g < 8; ++g) {
    const char* from = words + (kLayout == kPanels4 ? g / 2 : g) * C * 4;
    if (kLayout == kPanels6) {
      low[g] = LoadSix(words, g), high[g] = LoadSix(words + 64, g);
    } else {
      low[g] = _mm512_load_si512(from), high[g] = _mm512_load_si512(from + 64);
    }
    if (kLayout == kPanels8) continue;
    if (kLayout == kPanels4 && g % 2) {
      low[g] = _mm512_srli_epi16(low[g], 4), high[g] = _mm512_srli_epi16(high[g], 4);
    }
    low[g] = _mm512_and_si512(low[g], mask), high[g] = _mm512_and_si512(high[g], mask);
  }
}

// Words of 4 codes, consecutive along k, of 32 rows: low[g] and high[g] of 16 rows each.
MX_INLINE void ChunkCodes(const Source& source, int64_t first_row, int64_t chunk, __m512i low[8],
                          __m512i high[8]) {
  if (source.layout != kStrided) {
    const char* words = (const char*)CodesAt(source, first_row, chunk);
    if (source.layout == kPanels4) return PanelCodes<kPanels4>(words, low, high);
    if (source.layout == kPanels6) return PanelCodes<kPanels6>(words, low, high);
    return PanelCodes<kPanels8>(words, low, high);
  }
  const ChunkSize size = SizeOfChunk(source, first_row, chunk);
  const __m256i none = _mm256_setzero_si256();
  if (source.k_stride == 1) {
    const int64_t at = first_row * source.row_stride + chunk * kChunk;
    __m512i t[16];
    MX_UNROLL
    for (int i = 0; i < 16; ++i) {
      const __m256i one =
          i < size.rows ? LoadCodes(source, at + i * source.row_stride, size.k) : none;
      const __m256i other =
          i + 16 < size.rows ? LoadCodes(source, at + (i + 16) * source.row_stride, size.k) : none;
      t[i] = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
    }
    Transpose16x16(t);
    MX_UNROLL
    for (int g = 0; g < 8; ++g) low[g] = t[g], high[g] = t[8 + g];
    return;
  }
  const int64_t at = chunk * kChunk * source.k_stride + first_row;
  for (int g = 0; g < 8; ++g) {
    __m512i bytes[4];
    MX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int k = 4 * g + i;
      bytes[i] = _mm512_cvtepu8_epi16(
          k < size.k ? LoadCodes(source, at + k * source.k_stride, size.rows) : none);
    }
    JoinWords(_mm512_or_si512(bytes[0], _mm512_slli_epi16(bytes[1], 8)),
              _mm512_or_si512(bytes[2], _mm512_slli_epi16(bytes[3], 8)), &low[g], &high[g]);
  }
}

// Words of a panel of four codes of each of 16 rows, from bf16 values of the even and the odd codes.
template <PanelType kType>
MX_INLINE void SpreadWords(__m512i even, __m512i odd, __m512i* words) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  if (kType != kFloat32) {
    words[0] = Select(upper, _mm512_slli_epi32(odd, 16), even);
    words[1] = Select(upper, odd, _mm512_srli_epi32(even, 16));
    return;
  }
  words[0] = _mm512_slli_epi32(even, 16), words[1] = _mm512_slli_epi32(odd, 16);
  words[2] = _mm512_and_si512(even, upper), words[3] = _mm512_and_si512(odd, upper);
}

// Codes to the words of a panel, of 16 rows.
template <PanelType kType>
MX_INLINE void Expand(const Decoder& decoder, const __m512i codes[8], __m512i words[32]) {
  if (kType != kInt8 && ElementBits(decoder.element) <= 6) {
    constexpr int kWords = (int)BytesPerElement(kType);
    const __m512i first = decoder.table[0], second = decoder.table[1];
    MX_UNROLL
    for (int g = 0; g < 8; ++g) {
      const __m512i even = _mm512_permutex2var_epi16(first, codes[g], second);
      const __m512i odd =
          _mm512_permutex2var_epi16(first, _mm512_srli_epi16(codes[g], 8), second);
      SpreadWords<kType>(even, odd, words + kWords * g);
    }
    return;
  }
  MX_UNROLL
  for (int g = 0; g < 8; ++g) {
    if (kType == kInt8) {
      words[g] = LookupBytes(decoder.table, decoder.levels, codes[g]);
      continue;
    }
    MX_UNROLL
    for (int half = 0; half < 2; ++half) {
      const __m512i pair = half ? _mm512_srli_epi32(codes[g], 16) : codes[g];
      const __m512i both = LookupWords(decoder, _mm512_cvtepi32_epi16(pair));
      if (kType == kFloat32) {
        words[4 * g + 2 * half] = _mm512_slli_epi32(both, 16);
        words[4 * g + 2 * half + 1] = _mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000));
      } else {
        words[2 * g + half] = both;
      }
    }
  }
}

// The words of one chunk of high-precision values.
template <PanelType kType>
MX_INLINE void ChunkValues(const Source& source, int64_t first_row, int64_t chunk, __m512i low[32],
                           __m512i high[32]) {
  constexpr int kWords = kChunk * (int)BytesPerElement(kType) / 4;
  const ChunkSize size = SizeOfChunk(source, first_row, chunk);
  const Elements32 none = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  if (source.k_stride == 1) {
    const int64_t at = first_row * source.row_stride + chunk * kChunk;
    for (int half = 0; half < 2; ++half) {
      __m512i t[2][16];
      MX_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * half + i;
        const Elements32 values =
            row < size.rows ? LoadValues<kType>(source, at + row * source.row_stride, size.k)
                            : none;
        t[0][i] = values.low, t[1][i] = values.high;
      }
      for (int part = 0; part < kWords / 16; ++part) {
        Transpose16x16(t[part]);
        MX_UNROLL
        for (int g = 0; g < 16; ++g) (half ? high : low)[16 * part + g] = t[part][g];
      }
    }
    return;
  }
  const int64_t at = chunk * kChunk * source.k_stride + first_row;
  constexpr int kPerWord = kChunk / kWords;
  for (int g = 0; g < kWords; ++g) {
    Elements32 values[4] = {none, none, none, none};
    for (int i = 0; i < kPerWord; ++i) {
      const int k = kPerWord * g + i;
      if (k < size.k) values[i] = LoadValues<kType>(source, at + k * source.k_stride, size.rows);
    }
    if (kType == kFloat32) low[g] = values[0].low, high[g] = values[0].high;
    else JoinWords(values[0].low, values[1].low, &low[g], &high[g]);
  }
}

// The words of one chunk, 32 rows wide, in two vectors for each position along k.
template <PanelType kType>
MX_INLINE void ChunkWords(const Decoder& decoder, const Source& source, int64_t first_row,
                          int64_t chunk, __m512i low[32], __m512i high[32]) {
  if (source.element > kElementInt8) {
    ChunkValues<kType>(source, first_row, chunk, low, high);
    return;
  }
  __m512i low_codes[8], high_codes[8];
  ChunkCodes(source, first_row, chunk, low_codes, high_codes);
  Expand<kType>(decoder, low_codes, low);
  Expand<kType>(decoder, high_codes, high);
}

template <PanelType kType, bool kLhs, class Writer>
MX_INLINE void Pack(const Source& source, int64_t first_row, const Writer& writer,
                    ScaleRange* range) {
  constexpr int kWords = kChunk * (int)BytesPerElement(kType) / 4;
  const Decoder decoder = MakeDecoder(source.element, kType);
  const float* table = ScaleTable(source.scale_kind, source.element, kType);
  const int64_t num_chunks = (source.k + kChunk - 1) / kChunk;
  const int per_chunk = kChunk / source.block;
  ScaleBounds bounds = NoBounds();
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    __m512 scales[2][2];
    LoadScales(source, table, first_row, chunk, scales, &bounds);
    WriteScales(writer, source, chunk, scales);
    __m512i low[32], high[32];
    ChunkWords<kType>(decoder, source, first_row, chunk, low, high);
    int64_t offset = per_chunk;
#if MX_RANK >= MX_RANK_avx512_vnni
    if (kType == kInt8 && kLhs) {
      // -128 * (sum of the block) takes out what was added to rhs.
      const __m512i ones = _mm512_set1_epi8(1);
      const int step = kWords / per_chunk;
      for (int s = 0; s < per_chunk; ++s) {
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int g = s * step; g < (s + 1) * step; ++g) {
          sums[0] = _mm512_dpbusd_epi32(sums[0], ones, low[g]);
          sums[1] = _mm512_dpbusd_epi32(sums[1], ones, high[g]);
        }
        const __m512i zero = _mm512_setzero_si512();
        writer.Row(chunk, offset++, _mm512_sub_epi32(zero, _mm512_slli_epi32(sums[0], 7)),
                   _mm512_sub_epi32(zero, _mm512_slli_epi32(sums[1], 7)));
      }
    }
#endif
    const __m512i flip = _mm512_set1_epi8(kType == kInt8 && !kLhs ? (char)0x80 : 0);
    MX_UNROLL
    for (int g = 0; g < kWords; ++g) {
      writer.Row(chunk, offset + g, _mm512_xor_si512(low[g], flip),
                 _mm512_xor_si512(high[g], flip));
    }
  }
  AddTo(bounds, range);
}

template <PanelType kType>
void PackLhs(const Source& source, int64_t first_row, char* out, int64_t stride,
               ScaleRange* range) {
  // A group has 30 rows: the last two of 32 belong to the next one.
  Source limited = source;
  if (limited.rows > first_row + kLhsGroupRows) limited.rows = first_row + kLhsGroupRows;
  const LhsWriter writer = {out, ChunkBytes(kType, source.block, R, true), stride};
  Pack<kType, true>(limited, first_row, writer, range);
}

// 32 codes to a panel's elements, in their order.
template <PanelType kType>
MX_INLINE Elements32 Decoded(const Decoder& decoder, __m256i codes) {
  if (kType == kInt8) {
    return {LookupBytes(decoder.table, decoder.levels, _mm512_castsi256_si512(codes)),
            _mm512_setzero_si512()};
  }
  const __m512i words = LookupWords(decoder, codes);
  return kType == kFloat32 ? Widen(words) : Elements32{words, _mm512_setzero_si512()};
}

// One row whose elements follow each other: they are in a panel's order as they lie.
template <PanelType kType>
MX_INLINE void PackRow(const Source& source, int64_t row, char* out, ScaleRange* range) {
  const Decoder decoder = MakeDecoder(source.element, kType);
  const float* table = ScaleTable(source.scale_kind, source.element, kType);
  const int per_chunk = kChunk / source.block;
  const FewWriter writer = {out, ChunkBytes(kType, source.block, 1, true), 1};
  ScaleBounds bounds = NoBounds();
  for (int64_t chunk = 0; chunk < (source.k + kChunk - 1) / kChunk; ++chunk) {
    __m512 scales[2][2];
    LoadScales(source, table, row, chunk, scales, &bounds);
    WriteScales(writer, source, chunk, scales);
    const int64_t at = row * source.row_stride + chunk * kChunk;
    const int count = SizeOfChunk(source, row, chunk).k;
    const Elements32 words = source.element > kElementInt8
                                 ? LoadValues<kType>(source, at, count)
                                 : Decoded<kType>(decoder, LoadCodes(source, at, count));
    char* to = out + chunk * writer.chunk_bytes + per_chunk * 4;
#if MX_RANK >= MX_RANK_avx512_vnni
    if (kType == kInt8) {
      const __m512i sums =
          _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), words.low);
      for (int s = 0; s < per_chunk; ++s, to += 4) {
        const __mmask16 mine = (__mmask16)((1 << source.block / 4) - 1) << s * source.block / 4;
        const int32_t correction = -128 * _mm512_mask_reduce_add_epi32(mine, sums);
        memcpy(to, &correction, sizeof correction);
      }
    }
#endif
    if (kType == kInt8) {
      _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(words.low));
    } else {
      _mm512_storeu_si512(to, words.low);
      if (kType == kFloat32) _mm512_storeu_si512(to + 64, words.high);
    }
  }
  AddTo(bounds, range);
}

template <PanelType kType>
void PackFew(const Source& source, int64_t first_row, int rows, char* out, ScaleRange* range) {
  Source limited = source;
  if (limited.rows > first_row + rows) limited.rows = first_row + rows;
  if (rows == 1 && source.k_stride == 1) return PackRow<kType>(limited, first_row, out, range);
  const FewWriter writer = {out, ChunkBytes(kType, source.block, rows, true), rows};
  Pack<kType, true>(limited, first_row, writer, range);
}

template <PanelType kType>
void PackRhs(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  const RhsWriter writer = {out, ChunkBytes(kType, source.block, C, false)};
  Pack<kType, false>(source, first_row, writer, range);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX512_INL_H_
