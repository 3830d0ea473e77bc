// Codes to what panels hold, with AVX2: words of 4 codes of each of 8 rows.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX2_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX2_INL_H_

#include <immintrin.h>
#include <stdint.h>

#include "common/target.h"
#include "products/kernels.h"
#include "products/weights.h"

#define MX_UNROLL _Pragma("GCC unroll 32")

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

// What is added to integers, whose products with those of a row are then one of an unsigned byte.
// The smaller it is, the more products have room in int16; vpdpbusd wants none.
MX_INLINE constexpr int OffsetOf(Element element) {
  return MX_RANK == MX_RANK_avx2 && LargestInteger(element) < 64 ? (int)LargestInteger(element) : 128;
}

// Whether panels of a type hold the values of an element.
constexpr bool Holds(PanelType type, Element element) {
  return type == kFloat32 || (type == kInt8 ? FitsInt8(element) : FitsInt16(element));
}

// 16 bytes, in both halves of a register.
MX_INLINE __m256i Sixteen(const int8_t* bytes) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
}

// By how much magnitudes of floats of 6 and 8 bits are lifted, so that what was subnormal is a normal
// number of bytes.
constexpr int LiftOf(Element element) {
  return ElementBits(element) == 6 ? 112 : element == kE4M3 ? 24 : 8;
}

// What look-ups need of a format.
template <Element kElement>
struct CodeTable {
  __m256i low, high;     // low bytes of the integers of codes below 16, and from 16 to 31
  __m256i lower, upper;  // bytes of the bf16 values of codes below 16
  __m256i lifts;         // what 0 and subnormal floats want beside LiftOf
  const float* values;

  CodeTable() {
    const ElementTables& tables = TablesOf(kElement);
    values = tables.float32;
    low = Sixteen(tables.int8), high = Sixteen(tables.int8 + 16);
    constexpr int kBits = kElementFacts[kElement].mantissa_bits, kNormal = 1 << kBits;
    int8_t bytes[3][16] = {};
    for (int i = 0; i < 16; ++i) {
      bytes[0][i] = (int8_t)tables.bf16[i], bytes[1][i] = (int8_t)(tables.bf16[i] >> 8);
    }
    for (int i = 0, top = 0; kNormal < 16 && i < kNormal; ++i) {
      if (i >> top > 1) ++top;
      bytes[2][16 - kNormal + i] = (int8_t)(
          i == 0 ? -LiftOf(kElement) : (top - kBits) * kNormal + (i << (kBits - top)) - i);
    }
    lower = Sixteen(bytes[0]), upper = Sixteen(bytes[1]), lifts = Sixteen(bytes[2]);
  }
};

template <>
struct CodeTable<kElementFloat32> {};

// ------------------------------------------------------------------------------------- integers

// The integers of 32 codes of a format that int8 holds.
template <Element kElement>
MX_INLINE __m256i Integers(const CodeTable<kElement>& table, __m256i codes) {
  if (kElement == kElementInt8) return codes;
  const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  const __m256i low = _mm256_shuffle_epi8(table.low, index);
  if (kElement == kE2M1) return low;
  const __m256i high = _mm256_shuffle_epi8(table.high, index);
  // A byte's upper bit chooses.
  const __m256i magnitude = _mm256_blendv_epi8(low, high, _mm256_slli_epi16(codes, 3));
  if (kElement == kE3M2) return magnitude;
  const __m256i sign = _mm256_or_si256(_mm256_slli_epi16(codes, 2), _mm256_set1_epi8(1));
  return _mm256_sign_epi8(magnitude, sign);
}

// Words of the even and the odd bytes of codes.
template <Element kElement>
MX_INLINE void IntegerWords(const CodeTable<kElement>& table, __m256i codes, __m256i* even,
                            __m256i* odd) {
  const __m256i bytes = Integers<kElement>(table, codes);
  if (kElement != kE3M2) {
    *even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), *odd = _mm256_srai_epi16(bytes, 8);
    return;
  }
  // Low bytes of magnitudes, of which the last four, from 256 on, have an upper one.
  const __m256i code = _mm256_and_si256(codes, _mm256_set1_epi8(31)), one = _mm256_set1_epi8(1);
  const __m256i upper = _mm256_and_si256(_mm256_cmpgt_epi8(code, _mm256_set1_epi8(27)), one);
  const __m256i mask = _mm256_set1_epi16(255);
  *even = _mm256_or_si256(_mm256_slli_epi16(upper, 8), _mm256_and_si256(mask, bytes));
  *odd = _mm256_or_si256(_mm256_andnot_si256(mask, upper), _mm256_srli_epi16(bytes, 8));
  *even = _mm256_sign_epi16(*even, _mm256_or_si256(_mm256_slli_epi16(codes, 10), one));
  *odd = _mm256_sign_epi16(*odd, _mm256_or_si256(_mm256_slli_epi16(codes, 2), one));
}

// --------------------------------------------------------------------------------------- floats

// What floats of 6 and 8 bits lack as FloatWords gives them.
constexpr float BiasFactor(Element element, bool lifted) {
  if (element == kE2M1 || element == kElementInt8) return 1.0f;
  const ElementFacts& facts = kElementFacts[element];
  const bool six = ElementBits(element) == 6;
  int exponent = 127 - facts.bias - (lifted || six ? LiftOf(element) >> facts.mantissa_bits : 0);
  float factor = 1.0f;
  for (; exponent > 0; --exponent) factor *= 2.0f;
  return factor;
}

// Lifted magnitudes as bytes: an exponent from 1 on, then the mantissa, or 0.
template <Element kElement>
MX_INLINE __m256i LiftedBytes(const CodeTable<kElement>& table, __m256i codes) {
  constexpr int kNormal = 1 << kElementFacts[kElement].mantissa_bits;
  const __m256i most = _mm256_set1_epi8((char)((1 << (ElementBits(kElement) - 1)) - 1));
  const __m256i magnitude = _mm256_and_si256(codes, most);
  // An index whose upper bit is set looks up 0.
  const __m256i index = _mm256_adds_epu8(magnitude, _mm256_set1_epi8((char)(128 - kNormal)));
  return _mm256_add_epi8(_mm256_add_epi8(magnitude, _mm256_set1_epi8((char)LiftOf(kElement))),
                         _mm256_shuffle_epi8(table.lifts, index));
}

// bf16 words of the even and the odd bytes of codes, but for BiasFactor. kLifted: where some floats of
// 8 bits are subnormal, they become normal numbers; see codes_avx512-inl.h. Those of 6 always do.
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
  constexpr bool kSix = ElementBits(kElement) == 6;
  constexpr int kShift = 7 - kElementFacts[kElement].mantissa_bits;
  if (!kLifted && !kSix) {
    const __m256i mask = _mm256_set1_epi16((short)(0x8000 | 127 << kShift));
    *even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8 - kShift), mask);
    *odd = _mm256_and_si256(_mm256_srai_epi16(codes, 8 - kShift), mask);
    return;
  }
  const __m256i bytes = LiftedBytes<kElement>(table, codes);
  // A product with a power of two and 0 takes a byte of each word to where it belongs.
  constexpr int kFactor = 1 << kShift;
  const __m256i sign = _mm256_set1_epi16((short)0x8000);
  const __m256i signs = kSix ? _mm256_slli_epi16(codes, 2) : codes;
  *even = _mm256_or_si256(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16((short)kFactor)),
                          _mm256_and_si256(_mm256_slli_epi16(signs, 8), sign));
  *odd = _mm256_or_si256(_mm256_maddubs_epi16(bytes, _mm256_set1_epi16((short)(kFactor << 8))),
                         _mm256_and_si256(signs, sign));
}

// Values of 4 codes of a word, of 8 rows; kFolded: without their BiasFactor.
template <Element kElement, bool kLifted, bool kFolded>
MX_INLINE void FloatsOf(const CodeTable<kElement>& table, __m256i word, __m256* values) {
  if (kElement == kElementInt8) {
    const __m256 unit = _mm256_set1_ps(1.0f / (1 << UnitShift(kElement)));
    for (int i = 0; i < 4; ++i) {
      const __m256i wide = _mm256_srai_epi32(_mm256_slli_epi32(word, 24 - 8 * i), 24);
      values[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(wide), unit);
    }
    return;
  }
  __m256i words[2];
  FloatWords<kElement, kLifted>(table, word, &words[0], &words[1]);
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  for (int i = 0; i < 4; ++i) {
    values[i] = (__m256)(i < 2 ? _mm256_slli_epi32(words[i], 16)
                               : _mm256_and_si256(words[i % 2], upper));
    constexpr float kFactor = BiasFactor(kElement, kLifted);
    if (kFactor != 1.0f && !kFolded) values[i] = _mm256_mul_ps(values[i], _mm256_set1_ps(kFactor));
  }
}

// The words of a panel of 4 codes of 8 rows. Int16 ones hold the first and third code, and the others.
template <PanelType kType, bool kLifted, bool kFolded, Element kElement>
MX_INLINE void Expand(const CodeTable<kElement>& table, __m256i codes, __m256i* words) {
  if constexpr (kType == kInt8) words[0] = Integers<kElement>(table, codes);
  else if constexpr (kType == kInt16) IntegerWords<kElement>(table, codes, words, words + 1);
  else FloatsOf<kElement, kLifted, kFolded>(table, codes, (__m256*)words);
}

// The same of any codes, NaN and Inf too.
template <PanelType kType, Element kElement>
MX_INLINE void ExpandAny(const CodeTable<kElement>& table, __m256i codes, __m256i* words) {
  if constexpr (kElement == kE4M3 || kElement == kE5M2) {
    const __m256i mask = _mm256_set1_epi8(kElement == kE4M3 ? 0x7f : 0x7c);
    const __m256i special = _mm256_cmpeq_epi8(_mm256_and_si256(codes, mask), mask);
    if (MX_UNLIKELY(!_mm256_testz_si256(special, special))) {
      for (int i = 0; i < 4; ++i) {
        const __m256i code = _mm256_and_si256(_mm256_srli_epi32(codes, 8 * i), _mm256_set1_epi32(255));
        words[i] = (__m256i)_mm256_i32gather_ps(table.values, code, 4);
      }
      return;
    }
  }
  Expand<kType, true, false>(table, codes, words);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_DECODE_AVX2_INL_H_
