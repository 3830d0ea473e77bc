// Panels of codes (weights.h) by one to sixteen rows, decoded on their way, with AVX-512. Adds in the
// order in which an unpacked panel is added, so the bits are the same.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX512_INL_H_

#include <immintrin.h>
#include <string.h>

#include "products/multiply_vectors-inl.h"
#include "products/weights.h"

namespace mx::MX_TARGET {
namespace {

// --------------------------------------------------------------------------------------- decoding

enum Coding { kCode4, kCode6, kCodeE4M3, kCodeE5M2, kCodeInt8 };

MX_INLINE constexpr Coding CodingOf(Element element) {
  return ElementBits(element) == 4   ? kCode4
         : ElementBits(element) == 6 ? kCode6
         : element == kE4M3          ? kCodeE4M3
         : element == kE5M2          ? kCodeE5M2
                                     : kCodeInt8;
}

// Floats of 8 bits are decoded to float32 but for a factor, which puts the bias right. It may go to
// lhs and to the scales instead, in two parts: kFoldLhs, and the rest at the end.
//
// Shifting a code is enough, but for subnormal codes: they would be subnormal float32, and Intel's
// processors take a hundred times as long for each product of one. A chunk that has any is decoded
// as kLifted: a code's magnitude moves up so far that a byte holds the exponents of what was
// subnormal too, as normal numbers, and 0; and the factor is smaller by as much.
MX_INLINE constexpr float BiasFactor(Coding coding, bool lifted) {
  return coding == kCodeE4M3   ? (lifted ? 0x1p117f : 0x1p120f)
         : coding == kCodeE5M2 ? (lifted ? 0x1p110f : 0x1p112f)
                               : 1.0f;
}
MX_INLINE constexpr bool IsByteFloat(Coding coding) {
  return coding == kCodeE4M3 || coding == kCodeE5M2;
}

// Lifted magnitudes of 64 floats of 8 bits as bytes: 5 bits of exponent, from 1 on, then the mantissa.
template <Coding kCoding>
MX_INLINE __m512i LiftedBytes(__m512i lifts, __m512i codes) {
  constexpr bool kE4 = kCoding == kCodeE4M3;
  const __m512i lift = _mm512_set1_epi8(kE4 ? 3 << 3 : 2 << 2);
  const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
  const __mmask64 low = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(kE4 ? 0x78 : 0x7c));
  return _mm512_add_epi8(magnitude, _mm512_mask_shuffle_epi8(lift, low, lifts, magnitude));
}

// By how much 0 and subnormal codes are lifted.
template <Coding kCoding>
MX_INLINE __m512i LiftOfSubnormals() {
  return _mm512_broadcast_i32x4(
      kCoding == kCodeE4M3
          ? _mm_setr_epi8(0, 7, 14, 17, 20, 21, 22, 23, 0, 0, 0, 0, 0, 0, 0, 0)
          : _mm_setr_epi8(0, 3, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
}

// How many codes a register has of each of its rows.
MX_INLINE constexpr int CodesPerWord(Coding coding) { return coding == kCode4 ? 8 : 4; }
// Bytes of a panel that such codes take, of all rows: of codes of six bits, three times in four.
MX_INLINE constexpr int BytesOfWords(Coding coding, int words) {
  return (coding == kCode6 ? words - words / 4 : words) * C * 4;
}
template <Coding kCoding>
constexpr int64_t RecordBytesOf(int32_t block) {
  return RecordScaleBytes(block) + kRecordChunks * BytesOfWords(kCoding, kChunk / CodesPerWord(kCoding));
}
// How many registers of codes belong together. Of codes of six bits the last of four lies in bits
// of the others: it has no line of its own to be fetched.
MX_INLINE constexpr int WordsPerTurn(Coding coding) { return coding == kCode6 ? 4 : 1; }
MX_INLINE constexpr bool HasLine(Coding coding, int word) {
  return coding != kCode6 || word % 4 != 3;
}

// A register of codes, `word` from `codes` on.
template <Coding kCoding>
MX_INLINE __m512i LoadWord(const char* codes, int word) {
  if (kCoding == kCode6) return LoadSix(codes, word);
  return _mm512_load_si512(codes + word * C * 4);
}

// What a register's look-up needs: values of 32, 64 or 256 codes.
struct CodeTable {
  __m512i part[8];
};

// Whether there is VBMI, whose look-up takes 64 bytes.
constexpr bool kByteLookup = MX_RANK >= MX_RANK_avx512_bf16;

// The upper or lower bytes of 64 words.
MX_INLINE __m512i BytesOf(const uint16_t* words, bool upper) {
  __m256i half[2];
  for (int i = 0; i < 2; ++i) {
    const __m512i both = _mm512_loadu_si512(words + 32 * i);
    half[i] = _mm512_cvtepi16_epi8(upper ? _mm512_srli_epi16(both, 8) : both);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}

template <PanelType kType, Coding kCoding>
MX_INLINE CodeTable MakeCodeTable(Element element) {
  const ElementTables& tables = TablesOf(element);
  CodeTable table;
  for (int i = 0; i < 8; ++i) table.part[i] = _mm512_setzero_si512();
  if (kType == kFloat32 && IsByteFloat(kCoding)) {
    table.part[0] = LiftOfSubnormals<kCoding>();
  } else if (kType == kInt8) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    if (kByteLookup && kCoding == kCode6) {
      table.part[0] = _mm512_xor_si512(_mm512_loadu_si512(tables.int8), flip);
      return table;
    }
    for (int i = 0; i < 4; ++i) {
      const __m128i bytes = _mm_loadu_si128((const __m128i*)(tables.int8 + 16 * i));
      table.part[i] = _mm512_xor_si512(_mm512_broadcast_i32x4(bytes), flip);
    }
  } else if (kCoding == kCode4 || kCoding == kCode6) {
    for (int i = 0; i < 2; ++i) table.part[i] = _mm512_loadu_si512(tables.bf16 + 32 * i);
  } else if (kType == kBf16) {
    for (int i = 0; i < 8; ++i) table.part[i] = BytesOf(tables.bf16 + 64 * (i % 4), i < 4);
  }
  return table;
}

// Codes to bytes, 128 added. A format of six bits has sixteen codes a table, or all of them in one.
template <Coding kCoding>
MX_INLINE __m512i BytesOfCodes(const CodeTable& table, __m512i codes) {
  if (kCoding == kCodeInt8) return _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80));
#if MX_RANK >= MX_RANK_avx512_bf16
  if (kCoding == kCode6) return _mm512_permutexvar_epi8(codes, table.part[0]);
#endif
  return LookupBytes(table.part, kCoding == kCode4 ? 1 : 2, codes);
}

// bf16 values, as words, of the even and the odd bytes of `codes`. For a float32 panel, floats of
// 8 bits come without their BiasFactor.
template <PanelType kType, Coding kCoding, bool kLifted>
MX_INLINE void LookUpWords(const CodeTable& table, __m512i codes, __m512i* even, __m512i* odd) {
  const __m512i* t = table.part;
  if (kCoding == kCode4) {
    // Bits beyond the fifth do not count, and the table has each of its 16 entries twice.
    *even = _mm512_permutexvar_epi16(codes, t[0]);
    *odd = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), t[0]);
  } else if (kCoding == kCode6) {
    *even = _mm512_permutex2var_epi16(t[0], codes, t[1]);
    *odd = _mm512_permutex2var_epi16(t[0], _mm512_srli_epi16(codes, 8), t[1]);
  } else if (kType == kFloat32 && !kLifted) {
    constexpr int kShift = kCoding == kCodeE5M2 ? 3 : 4;
    const __m512i mask = _mm512_set1_epi16((short)(kCoding == kCodeE5M2 ? 0x8fe0 : 0x87f0));
    *even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), kShift), mask);
    *odd = _mm512_and_si512(_mm512_srai_epi16(codes, kShift), mask);
  } else if (kType == kFloat32) {
    // A product with a power of two and 0 takes a byte of each word to where it belongs.
    constexpr short kShift = kCoding == kCodeE5M2 ? 1 << 5 : 1 << 4;
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    const __m512i bytes = LiftedBytes<kCoding>(t[0], codes);
    const __m512i low = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(kShift));
    const __m512i high = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(kShift << 8));
    *even = Select(sign, _mm512_slli_epi16(codes, 8), low);
    *odd = Select(sign, codes, high);
  }
#if MX_RANK >= MX_RANK_avx512_bf16
  else {
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512i upper = _mm512_permutex2var_epi8(t[0], codes, t[1]);
    __m512i lower = _mm512_permutex2var_epi8(t[4], codes, t[5]);
    if (kCoding == kCodeInt8) {
      const __mmask64 negative = _mm512_movepi8_mask(codes);
      upper = _mm512_mask_mov_epi8(upper, negative, _mm512_permutex2var_epi8(t[2], codes, t[3]));
      lower = _mm512_mask_mov_epi8(lower, negative, _mm512_permutex2var_epi8(t[6], codes, t[7]));
    } else {
      upper = Select(sign, codes, upper);
    }
    const __m512i top = _mm512_set1_epi16((short)0xff00);
    *even = Select(top, _mm512_slli_epi16(upper, 8), lower);
    *odd = Select(top, upper, _mm512_srli_epi16(lower, 8));
  }
#endif
}

// Words of a panel, in the order of k, of a register's codes: 8 to a word of rows if kCode4, else 4.
// Without their BiasFactor if kFold.
template <PanelType kType, Coding kCoding, bool kFold, bool kLifted>
MX_INLINE void DecodeWords(const CodeTable& table, __m512i codes, __m512i* words) {
  if (kType == kInt8) {
    words[0] = BytesOfCodes<kCoding>(table, codes);
    if (kCoding == kCode4) {
      words[1] = BytesOfCodes<kCoding>(table, _mm512_srli_epi16(codes, 4));
    }
    return;
  }
  if (kType == kFloat32 && kCoding == kCodeInt8) {
    MX_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512i integers = _mm512_srai_epi32(_mm512_slli_epi32(codes, 24 - 8 * i), 24);
      words[i] = _mm512_castps_si512(
          _mm512_mul_ps(_mm512_cvtepi32_ps(integers), _mm512_set1_ps(0x1p-6f)));
    }
    return;
  }
  MX_UNROLL
  for (int nibble = 0; nibble < (kCoding == kCode4 ? 2 : 1); ++nibble) {
    __m512i even, odd;
    LookUpWords<kType, kCoding, kLifted>(table, nibble ? _mm512_srli_epi16(codes, 4) : codes, &even,
                                         &odd);
    __m512i* to = words + nibble * 2 * (kType == kFloat32 ? 2 : 1);
    SpreadWords<kType>(even, odd, to);
    if (kType != kFloat32 || kFold || !IsByteFloat(kCoding)) continue;
    const __m512 factor = _mm512_set1_ps(BiasFactor(kCoding, kLifted));
    MX_UNROLL
    for (int i = 0; i < 4; ++i) {
      to[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(to[i]), factor));
    }
  }
}

// ------------------------------------------------------------------------------------ multiplying

// 16 tame scales times `factor`, a power of two. E8M0: as bits, less float32's bias, to which the
// bits of another scale are added.
MX_INLINE __m512 TameScales(ScaleKind kind, const uint8_t* bytes, float factor) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)bytes));
  if (kind == kScaleE8M0) {
    int32_t bits;
    memcpy(&bits, &factor, sizeof bits);
    const __m512i bias = _mm512_set1_epi32(bits - (254 << 23));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(wide, 23), bias));
  }
  // A half with the code's bits is it, subnormal or not, but for a power of two.
  const __m256i halves = _mm256_slli_epi16(_mm512_cvtepi32_epi16(wide), 7);
  return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(0x1p8f * factor));
}

// Panels follow each other, so what comes next lies ahead. Far ahead it is fetched to the second level
// of the cache, since prefetchers of the hardware stop at pages, and near ahead to the first, of which
// a first level of 32 KiB has room beside lhs. At 1 KiB a Zen 5 waits for memory: 1.15 times the time.
constexpr int64_t kFarAhead = 12 << 10, kNearAhead = 6 << 10;

MX_INLINE void PrefetchAhead(const char* line) {
  _mm_prefetch(line + kFarAhead, _MM_HINT_T1);
  _mm_prefetch(line + kNearAhead, _MM_HINT_T0);
}

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// How many halves of a panel are multiplied at once. Many rows have sums enough in one, and no
// registers left for totals, which stay in the tile.
constexpr int HalvesOf(int rows) { return rows > 4 ? 1 : 2; }

// The count of a loop that is not to be unrolled: of several rows the instructions would not fit their
// cache.
template <int kRows>
MX_INLINE int Loops(int count) {
  if (kRows > 2) asm("" : "+r"(count));
  return count;
}

// kTogether blocks of a record, from `first` on, by a panel of kRows rows: sums of different blocks
// need not wait for each other. `half` is the panel's half to begin with.
template <PanelType kType, Coding kCoding, int kBlocks, int kRows, int kTogether, bool kFold,
          bool kLifted>
MX_INLINE void AddBlocks(const CodesProduct& p, const CodeTable& table, const char* record,
                         const char* left, int first, int half, float unscaled,
                         __m512 (&total)[kRows][2]) {
  constexpr int kHalves = HalvesOf(kRows);
  constexpr int kCodes = CodesPerWord(kCoding), kTurn = WordsPerTurn(kCoding);
  constexpr int kWords = kCodes * (int)BytesPerElement(kType) / 4;
  constexpr int kGroups = kChunk / kCodes / kBlocks;  // of registers, in a block
  constexpr int kPart = kCoding == kCode4 ? kWords / 2 : kWords;
  constexpr int64_t kLhsChunk = ChunkBytes(kType, kChunk / kBlocks, kRows, true);
  constexpr int kFirstWord = kBlocks * kRows * (kType == kInt8 ? 2 : 1);
  const char* codes = record + RecordScaleBytes(kChunk / kBlocks) +
                      BytesOfWords(kCoding, first * kGroups) + 64 * half;
  const int32_t* values[kTogether];  // of the chunk that a block is in
  __m512i sum[kTogether][kRows][kHalves];
  MX_UNROLL
  for (int t = 0; t < kTogether; ++t) {
    const int block = (first + t) % kBlocks;
    values[t] = (const int32_t*)(left + (first + t) / kBlocks * kLhsChunk);
    MX_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MX_UNROLL
      for (int j = 0; j < kHalves; ++j) {
        sum[t][i][j] = kType == kInt8 ? _mm512_set1_epi32(values[t][(kBlocks + block) * kRows + i])
                                      : _mm512_setzero_si512();
      }
    }
  }
  const auto add = [&](int g, int turn) {
    MX_UNROLL
    for (int t = 0; t < kTogether; ++t) {
      const char* from = codes + BytesOfWords(kCoding, t * kGroups + g);
      const int32_t* words =
          values[t] + kFirstWord + ((first + t) % kBlocks * kGroups + g + turn) * kWords * kRows;
      // Half of the words at a time, of both registers in turn: schedulers hold few instructions
      // that wait, and those of one sum wait for each other.
      MX_UNROLL
      for (int part = 0; part < kWords; part += kPart) {
        __m512i decoded[kHalves][kWords];
        MX_UNROLL
        for (int j = 0; j < kHalves; ++j) {
          if (part == 0 && HasLine(kCoding, turn)) {
            PrefetchAhead(from + BytesOfWords(kCoding, turn) + 64 * j);
          }
          DecodeWords<kType, kCoding, kFold, kLifted>(
              table, LoadWord<kCoding>(from + 64 * j, turn), decoded[j]);
        }
        MX_UNROLL
        for (int w = part; w < part + kPart; ++w) {
          MX_UNROLL
          for (int i = 0; i < kRows; ++i) {
            const __m512i value = _mm512_set1_epi32(words[w * kRows + i]);
            MX_UNROLL
            for (int j = 0; j < kHalves; ++j) {
              sum[t][i][j] = MultiplyAdd<kType>(sum[t][i][j], decoded[j][w], value);
            }
          }
        }
      }
    }
  };
  for (int g = 0, groups = Loops<kRows>(kGroups); g < groups; g += kTurn) {
    MX_UNROLL
    for (int turn = 0; turn < kTurn; ++turn) add(g, turn);
  }
  const float factor = kFold ? BiasFactor(kCoding, kLifted) / kFoldLhs * unscaled : unscaled;
  MX_UNROLL
  for (int t = 0; t < kTogether; ++t) {
    const uint8_t* scales = (const uint8_t*)record + (first + t) * C + 16 * half;
    if ((first + t) % 2 == 0 && half == 0) PrefetchAhead((const char*)scales);
    const float* mine = (const float*)values[t] + (first + t) % kBlocks * kRows;
    MX_UNROLL
    for (int j = 0; j < kHalves; ++j) {
      const __m512 scale = TameScales(p.scale_kind, scales + 16 * j, factor);
      MX_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float* kept = p.tile + i * C + 16 * half;
        const __m512 before = kHalves == 1 ? _mm512_load_ps(kept) : total[i][j];
        const __m512 exact = AsFloat<kType>(sum[t][i][j]);
        const __m512 after = p.scale_kind == kScaleE8M0
                                 ? AddScaled<kNormal>(before, exact, scale, mine[i])
                                 : AddScaled<kProduct>(before, exact, scale, mine[i]);
        if (kHalves == 1) _mm512_store_ps(kept, after);
        else total[i][j] = after;
      }
    }
  }
}

// kChunks chunks of a record: both, or the only one at the end of k.
template <PanelType kType, Coding kCoding, int kBlocks, int kRows, int kChunks, bool kFold,
          bool kLifted>
MX_INLINE void AddRecord(const CodesProduct& p, const CodeTable& table, const char* record,
                         const char* left, float unscaled, __m512 (&total)[kRows][2]) {
  // Sums enough for the multipliers, and no more than there are registers for.
  constexpr int kWanted = kRows == 1 ? 4 : kRows == 2 ? 2 : 1, kAll = kChunks * kBlocks;
  constexpr int kTogether = kWanted < kAll ? kWanted : kAll;
  for (int first = 0, last = Loops<kRows>(kAll); first < last; first += kTogether) {
    for (int half = 0, halves = Loops<kRows>(2); half < halves; half += HalvesOf(kRows)) {
      AddBlocks<kType, kCoding, kBlocks, kRows, kTogether, kFold, kLifted>(
          p, table, record, left, first, half, unscaled, total);
    }
  }
}

template <PanelType kType, Coding kCoding, int kBlocks, int kRows, bool kFold>
void MultiplyCodesOf(const CodesProduct& p) {
  constexpr bool kMayLift = kType == kFloat32 && IsByteFloat(kCoding);
  constexpr int64_t kLhsChunk = ChunkBytes(kType, kChunk / kBlocks, kRows, true);
  const CodeTable table = MakeCodeTable<kType, kCoding>(p.element);
  // What scale 1 stands for: the elements' own factor.
  const float unscaled = ScaleTable(p.scale_kind, p.element,
                                    kType)[p.scale_kind == kScaleE8M0 ? 127 : 0x38];
  const int shift = kMayLift ? SummaryShift(p.num_chunks) : 0;
  constexpr bool kInTile = HalvesOf(kRows) == 1;
  __m512 total[kRows][2];
  MX_UNROLL
  for (int i = 0; i < 2 * kRows; ++i) {
    float* kept = p.tile + 16 * i;
    if (kInTile && p.clear) _mm512_store_ps(kept, _mm512_setzero_ps());
    if (!kInTile) total[i / 2][i % 2] = p.clear ? _mm512_setzero_ps() : _mm512_load_ps(kept);
  }
  const char* record = p.records;
  const char* left = p.lhs;
  for (int64_t chunk = 0; chunk < p.num_chunks; chunk += kRecordChunks) {
    const bool whole = chunk + 1 < p.num_chunks;
    const bool lifted = kMayLift && HasSubnormals(*p.summary, chunk, chunk + whole, shift);
    const auto add = [&](auto lifts) {
      constexpr bool kLifted = decltype(lifts)::value;
      if (MX_LIKELY(whole)) {
        AddRecord<kType, kCoding, kBlocks, kRows, 2, kFold, kLifted>(p, table, record, left,
                                                                     unscaled, total);
      } else {
        AddRecord<kType, kCoding, kBlocks, kRows, 1, kFold, kLifted>(p, table, record, left,
                                                                     unscaled, total);
      }
    };
    if (lifted) add(Constant<kMayLift>());
    else add(Constant<false>());
    record += RecordBytesOf<kCoding>(kChunk / kBlocks);
    left += kRecordChunks * kLhsChunk;
  }
  MX_UNROLL
  for (int i = 0; i < 2 * kRows; ++i) {
    if (!kInTile) _mm512_store_ps(p.tile + 16 * i, total[i / 2][i % 2]);
  }
}

template <PanelType kType, Coding kCoding, int kBlocks, bool kFold>
MX_INLINE void MultiplyCodesRows(const CodesProduct& p) {
  if (p.rows == 1) return MultiplyCodesOf<kType, kCoding, kBlocks, 1, kFold>(p);
  if (p.rows == 2) return MultiplyCodesOf<kType, kCoding, kBlocks, 2, kFold>(p);
  if (p.rows == 4) return MultiplyCodesOf<kType, kCoding, kBlocks, 4, kFold>(p);
  // Integers and bfloat16 of so many rows are kept: see keep_avx512-inl.h.
  if constexpr (kType == kFloat32) {
    if (p.rows == 16) return MultiplyCodesOf<kType, kCoding, kBlocks, 16, kFold>(p);
  }
  MultiplyCodesOf<kType, kCoding, kBlocks, 8, kFold>(p);
}

template <PanelType kType, Coding kCoding, bool kFold>
MX_INLINE void MultiplyCodesBlocks(const CodesProduct& p) {
  p.block == kChunk ? MultiplyCodesRows<kType, kCoding, 1, kFold>(p)
                    : MultiplyCodesRows<kType, kCoding, 2, kFold>(p);
}

template <PanelType kType, Coding kCoding>
MX_INLINE void MultiplyCodesAs(const CodesProduct& p) {
  if constexpr (kType == kFloat32 && IsByteFloat(kCoding)) {
    if (p.folded) return MultiplyCodesBlocks<kType, kCoding, true>(p);
  }
  MultiplyCodesBlocks<kType, kCoding, false>(p);
}

template <PanelType kType>
void MultiplyCodes(const CodesProduct& p) {
  ByElement(p.element, [&p](auto element) {
    constexpr Element kElement = decltype(element)::value;
    if constexpr (kType != kInt8 || FitsInt8(kElement)) {
      MultiplyCodesAs<kType, CodingOf(kElement)>(p);
    }
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX512_INL_H_
