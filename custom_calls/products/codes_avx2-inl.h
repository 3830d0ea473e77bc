// What codes_rows-inl.h takes of AVX2.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_

#include <immintrin.h>
#include <stdint.h>

#include "products/kernels.h"
#include "products/weights.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 8;

// Word `word` of a chunk, of 8 rows: its codes are in the bits that the format has, above those is
// anything.
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

// 16 bytes, in both halves of a register.
MX_INLINE __m256i Sixteen(const int8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
}

// What look-ups need of a format.
template <Element kElement>
struct CodeTable {
  __m256i low, high;     // integers of codes below 16, and from 16 to 31
  __m256i lower, upper;  // bytes of the bf16 values of codes below 16
  __m256i lifts;         // of subnormal floats of 8 bits
  const float* values;

  CodeTable() {
    const ElementTables& tables = TablesOf(kElement);
    values = tables.float32;
    low = Sixteen(tables.int8), high = Sixteen(tables.int8 + 16);
    int8_t bytes[2][16];
    for (int i = 0; i < 16; ++i) {
      bytes[0][i] = (int8_t)tables.bf16[i], bytes[1][i] = (int8_t)(tables.bf16[i] >> 8);
    }
    lower = Sixteen(bytes[0]), upper = Sixteen(bytes[1]);
    const int8_t e4m3[16] = {0, 7, 14, 17, 20, 21, 22, 23}, e5m2[16] = {0, 3, 6, 7};
    lifts = Sixteen(kElement == kE4M3 ? e4m3 : e5m2);
  }
};

// The integers of 32 codes of MXINT8 or of a format that int8 holds.
template <Element kElement>
MX_INLINE __m256i Integers(const CodeTable<kElement>& table, __m256i codes) {
  if (kElement == kElementInt8) return codes;
  const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(table.low, index);
  if (kElement == kE2M1) return low;
  const __m256i high = _mm256_shuffle_epi8(table.high, index);
  // A byte's upper bit chooses.
  const __m256i magnitude = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(codes, 3));
  const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(codes, 2), _mm256_set1_epi8(1));
  return _mm256_sign_epi8(magnitude, sign);
}

// ------------------------------------------------------------------------------ by float32 rows

// bf16 words of the even and the odd bytes of codes. Floats of 8 bits lack a power of two. kLifted:
// where some of them are subnormal, they become normal numbers; see codes_avx512-inl.h.
template <Element kElement, bool kLifted>
MX_INLINE void FloatWords(const CodeTable<kElement>& table, __m256i codes, __m256i* even,
                          __m256i* odd) {
  if (kElement == kE2M1) {
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i lower = _mm256_shuffle_epi8(table.lower, index);
    const __m256i upper = _mm256_shuffle_epi8(table.upper, index);
    const __m256i mask = _mm256_set1_epi16(255);
    *even = _mm256_or_si256(_mm256_slli_epi16(upper, 8), _mm256_and_si256(mask, lower));
    *odd = _mm256_or_si256(_mm256_andnot_si256(mask, upper), _mm256_srli_epi16(lower, 8));
    return;
  }
  constexpr bool kE4 = kElement == kE4M3;
  if (!kLifted) {
    constexpr int kShift = kE4 ? 4 : 3;
    const __m256i mask = _mm256_set1_epi16((short)(kE4 ? 0x87f0 : 0x8fe0));
    *even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), kShift), mask);
    *odd = _mm256_and_si256(_mm256_srai_epi16(codes, kShift), mask);
    return;
  }
  const __m256i zero = _mm256_setzero_si256();
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
  const __m256i exponent = _mm256_and_si256(codes, _mm256_set1_epi8(kE4 ? 0x78 : 0x7c));
  const __m256i lift = _mm256_blendv_epi8(_mm256_set1_epi8(kE4 ? 3 << 3 : 2 << 2),
                                          _mm256_shuffle_epi8(table.lifts, magnitude),
                                          _mm256_cmpeq_epi8(exponent, zero));
  const __m256i bytes = _mm256_add_epi8(magnitude, lift);
  // A product with a power of two and 0 takes a byte of each word to where it belongs.
  constexpr short kFactor = kE4 ? 1 << 4 : 1 << 5;
  const __m256i sign = _mm256_set1_epi16((short)0x8000);
  *even = _mm256_or_si256(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16(kFactor)),
                          _mm256_and_si256(_mm256_slli_epi16(codes, 8), sign));
  *odd = _mm256_or_si256(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16((short)(kFactor << 8))),
                         _mm256_and_si256(codes, sign));
}

// Values of 4 codes of a word, of 8 rows: of its low halves, or of the high ones too if they are
// codes of 4 bits.
template <Element kElement, bool kLifted>
MX_INLINE void Decode(const CodeTable<kElement>& table, __m256i word, int half, __m256* values) {
  if (kElement == kE2M1 || kElement == kE4M3 || kElement == kE5M2) {
    __m256i words[2];
    FloatWords<kElement, kLifted>(table, half ? _mm256_srli_epi16(word, 4) : word, &words[0],
                                  &words[1]);
    const __m256 factor = _mm256_set1_ps(kElement == kE4M3 ? (kLifted ? 0x1p117f : 0x1p120f)
                                                           : (kLifted ? 0x1p110f : 0x1p112f));
    for (int i = 0; i < 4; ++i) {
      const __m256i bits = i < 2 ? _mm256_slli_epi32(words[i], 16)
                                 : _mm256_and_si256(words[i % 2],
                                                    _mm256_set1_epi32((int)0xffff0000));
      values[i] = _mm256_castsi256_ps(bits);
      if (kElement != kE2M1) values[i] = _mm256_mul_ps(values[i], factor);
    }
  } else if (FitsInt8(kElement)) {
    const __m256 unit = _mm256_set1_ps(1.0f / (1 << UnitShift(kElement)));
    const __m256i integers = Integers<kElement>(table, word);
    for (int i = 0; i < 4; ++i) {
      const __m256i wide = _mm256_srai_epi32(_mm256_slli_epi32(integers, 24 - 8 * i), 24);
      values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), unit);
    }
  } else {
    for (int i = 0; i < 4; ++i) {
      const __m256i code =
          _mm256_and_si256(_mm256_srli_epi32(word, 8 * i), _mm256_set1_epi32(63));
      values[i] = _mm256_i32gather_ps(table.values, code, 4);
    }
  }
}

// Columns at a time, in registers of 8: as many as there are registers for their sums, of which
// integers have two.
constexpr int GroupsOf(PanelType type, int rows) {
  return rows > 4 ? 1 : type == kInt8 ? 4 / rows : rows > 2 ? 2 : 4;
}

// Sums of a block by kRows rows: `values` are the block's, of kRows rows each.
template <Element kElement, int kBlocks, int kRows, bool kLifted>
MX_INLINE void SumFloats(const CodeTable<kElement>& table, const uint8_t* codes, int block,
                         const float* values, __m256 (&sum)[kRows][GroupsOf(kFloat32, kRows)]) {
  constexpr int kGroups = GroupsOf(kFloat32, kRows), kHalves = kElement == kE2M1 ? 2 : 1;
  constexpr int kWords = kChunk / kBlocks / (4 * kHalves);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kGroups; ++j) sum[i][j] = _mm256_setzero_ps();
  }
  for (int w = 0; w < kWords; ++w) {
    for (int half = 0; half < kHalves; ++half, values += 4 * kRows) {
      for (int j = 0; j < kGroups; ++j) {
        const __m256i word =
            LoadWord<LayoutOf(kElement)>(codes + 4 * kLanes * j, block * kWords + w);
        __m256 decoded[4];
        Decode<kElement, kLifted>(table, word, half, decoded);
        for (int c = 0; c < 4; ++c) {
          for (int i = 0; i < kRows; ++i) {
            const __m256 factor = _mm256_broadcast_ss(values + c * kRows + i);
            sum[i][j] = _mm256_fmadd_ps(decoded[c], factor, sum[i][j]);
          }
        }
      }
    }
  }
}

// --------------------------------------------------------------------------------- by int8 rows

// What is added to integers, whose products with those of a row are then one of an unsigned byte; 0
// where a pair of these would be more than an int16.
MX_INLINE constexpr int OffsetOf(Element element) {
  return LargestInteger(element) < 64 ? static_cast<int>(LargestInteger(element)) : 0;
}

// The same of integers, exact. `corrections` are -128 times the sums of the rows' elements.
template <Element kElement, int kBlocks, int kRows>
MX_INLINE void SumIntegers(const CodeTable<kElement>& table, const uint8_t* codes, int block,
                           const int32_t* corrections, const int32_t* values,
                           __m256 (&sum)[kRows][GroupsOf(kInt8, kRows)]) {
  constexpr int kGroups = GroupsOf(kInt8, kRows), kHalves = kElement == kE2M1 ? 2 : 1;
  constexpr int kWords = kChunk / kBlocks / (4 * kHalves), kOffset = OffsetOf(kElement);
  const __m256i ones = _mm256_set1_epi16(1), offset = _mm256_set1_epi8(kOffset);
  CodeTable<kElement> moved = table;
  if (kElement == kE2M1) moved.low = _mm256_add_epi8(table.low, offset);
  __m256i total[kRows][kGroups];
  for (int i = 0; i < kRows; ++i) {
    const __m256i begin = _mm256_set1_epi32((corrections[i] >> 7) * kOffset);
    for (int j = 0; j < kGroups; ++j) total[i][j] = begin;
  }
  if constexpr (kElement == kE2M1) {
    // A pair of products is at most 2 * 24 * 128 there, so four of them are an int16.
    for (int w = 0; w < kWords; w += 2) {
      __m256i pairs[kRows][kGroups];
      for (int part = 0; part < 4; ++part, values += kRows) {
        for (int j = 0; j < kGroups; ++j) {
          const __m256i word =
              LoadWord<kPanels4>(codes + 4 * kLanes * j, block * kWords + w + part / 2);
          const __m256i bytes =
              Integers<kElement>(moved, part % 2 ? _mm256_srli_epi16(word, 4) : word);
          for (int i = 0; i < kRows; ++i) {
            const __m256i two = _mm256_maddubs_epi16(bytes, _mm256_set1_epi32(values[i]));
            pairs[i][j] = part == 0 ? two : _mm256_add_epi16(pairs[i][j], two);
          }
        }
      }
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kGroups; ++j) {
          total[i][j] = _mm256_add_epi32(total[i][j], _mm256_madd_epi16(pairs[i][j], ones));
        }
      }
    }
  } else {
    for (int w = 0; w < kWords; ++w, values += kRows) {
      for (int j = 0; j < kGroups; ++j) {
        const __m256i word =
            LoadWord<LayoutOf(kElement)>(codes + 4 * kLanes * j, block * kWords + w);
        const __m256i bytes = Integers<kElement>(moved, word);
        for (int i = 0; i < kRows; ++i) {
          const __m256i factors = _mm256_set1_epi32(values[i]);
          __m256i four;
          if (kOffset != 0) {
            const __m256i pairs =
                _mm256_maddubs_epi16(_mm256_add_epi8(bytes, offset), factors);
            four = _mm256_madd_epi16(pairs, ones);
          } else {
            // Products of any bytes: a pair of them is more than an int16.
            const auto even = [](__m256i x) {
              return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
            };
            four = _mm256_add_epi32(
                _mm256_madd_epi16(even(bytes), even(factors)),
                _mm256_madd_epi16(_mm256_srai_epi16(bytes, 8), _mm256_srai_epi16(factors, 8)));
          }
          total[i][j] = _mm256_add_epi32(total[i][j], four);
        }
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kGroups; ++j) sum[i][j] = _mm256_cvtepi32_ps(total[i][j]);
  }
}

// ------------------------------------------------------------------------------------ all of it

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

template <PanelType kType, Element kElement, int kBlocks, int kRows, bool kLifted>
MX_INLINE void AddChunk(const CodesProduct& p, const CodeTable<kElement>& table,
                        const uint8_t* codes, const uint8_t* scales, const char* left, float unit) {
  constexpr int kGroups = GroupsOf(kType, kRows), kBlock = kChunk / kBlocks;
  const float* mine = (const float*)left;
  for (int block = 0; block < kBlocks; ++block) {
    for (int column = 0; column < kTileColumns; column += kLanes * kGroups) {
      __m256 sum[kRows][kGroups];
      if constexpr (kType == kInt8) {
        const int32_t* corrections = (const int32_t*)left + kBlocks * kRows;
        SumIntegers<kElement, kBlocks, kRows>(
            table, codes + 4 * column, block, corrections + block * kRows,
            corrections + (kBlocks + block * kBlock / 4) * kRows, sum);
      } else {
        SumFloats<kElement, kBlocks, kRows, kLifted>(table, codes + 4 * column, block,
                                                     mine + (kBlocks + block * kBlock) * kRows,
                                                     sum);
      }
      for (int j = 0; j < kGroups; ++j) {
        const int at = column + kLanes * j;
        const __m256 right = TameScales(p.scale_kind, scales + block * kTileColumns + at, unit);
        for (int i = 0; i < kRows; ++i) {
          float* total = p.tile + i * kTileColumns + at;
          const __m256 factor = _mm256_mul_ps(_mm256_broadcast_ss(mine + block * kRows + i), right);
          const __m256 added = _mm256_mul_ps(sum[i][j], factor);
          _mm256_store_ps(total, _mm256_add_ps(_mm256_load_ps(total), added));
        }
      }
    }
  }
}

// Where some floats of 8 bits are subnormal, they are decoded in another way.
constexpr bool kLifts = true;

// Into the second level of the cache, as the hardware's prefetchers stop at pages, and into the first.
MX_INLINE void PrefetchAhead(const uint8_t* line) {
  _mm_prefetch((const char*)line + (12 << 10), _MM_HINT_T1);
  _mm_prefetch((const char*)line + (1 << 10), _MM_HINT_T0);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_AVX2_INL_H_
