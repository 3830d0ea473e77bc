// E2M1 under any scale, with byte permutations (VBMI): a scaled value is cut to a word that tells
// between which codes it lies, and a table of sixty-four entries gives the code.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_TABLE_VBMI_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_TABLE_VBMI_INL_H_

#include "casts/vectors_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

// Thirty-two values as words: sign, exponent, and seven bits of mantissa, of which the last is also
// set by whatever was cut off.
MX_INLINE __m512i CutToWords(__m512i a, __m512i b) {
  alignas(64) static const uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20,
                                                 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42,
                                                 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i even = _mm512_load_si512(kEven);
  const __m512i odd = _mm512_add_epi16(even, Set(0x00010001));
  const __m512i high = _mm512_permutex2var_epi16(a, odd, b);
  const __m512i low = _mm512_permutex2var_epi16(a, even, b);
  return _mm512_or_si512(high, _mm512_min_epu16(low, Set(0x00010001)));
}

// E2M1 by magnitude, from 2^-2 on, the half of its smallest code, up to 2^3: three bits of octave,
// two of mantissa, and one for what lies below.
alignas(64) static const uint8_t kE2m1[64] = {
    0, 1, 1, 1, 1, 1, 1, 1,  // 0.25
    1, 1, 1, 1, 2, 2, 2, 2,  // 0.5: 0.75 is half way
    2, 2, 2, 3, 3, 3, 4, 4,  // 1: 1.25 and 1.75
    4, 4, 4, 5, 5, 5, 6, 6,  // 2: 2.5 and 3.5
    6, 6, 6, 7, 7, 7, 7, 7,  // 4: 5
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};

MX_INLINE bool IsE2m1(const ElementFormat& element) {
  return element.bits == 4 && element.mantissa_bits == 1 && element.emin == 0 &&
         element.max_code == 7;
}

// The table's index of 32 values as words.
MX_INLINE __m512i E2m1Indices(__m512i words) {
  const __m512i below = Set(0x000f000f);
  const __m512i sticky = _mm512_add_epi16(_mm512_and_si512(words, below), below);
  const __m512i magnitude = _mm512_ternarylogic_epi32(words, sticky, Set(0x7fff7fff), 0xa8);
  constexpr int32_t kFirst = (127 - 2) << 3;
  return _mm512_subs_epu16(_mm512_srli_epi16(magnitude, 4), Set(kFirst * 0x00010001));
}

template <Way kWay, class T>
MX_INLINE int64_t EncodeByTable(const T* x, int64_t n, int shift, const GroupScales& scales,
                                const ElementFormat& element, const Encoder& encoder,
                                uint8_t** out) {
  if (kWay != Way::kFloatWide || !IsE2m1(element)) return 0;
  const __m512i table = _mm512_load_si512(kE2m1);
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    __m512i words[2];
    for (int v = 0; v < 2; ++v) {
      const int64_t at = i + 2 * v * kLanes;
      const __m512 a = Scaled<kWay>(x + at, scales.factor[(at / kLanes) >> shift]);
      const __m512 b = Scaled<kWay>(x + at + kLanes, scales.factor[(at / kLanes + 1) >> shift]);
      words[v] = CutToWords(_mm512_castps_si512(a), _mm512_castps_si512(b));
    }
    __m512i index = _mm512_packus_epi16(E2m1Indices(words[0]), E2m1Indices(words[1]));
    index = _mm512_permutexvar_epi64(order, _mm512_min_epu8(index, _mm512_set1_epi8(63)));
    const uint64_t low = _mm512_movepi16_mask(words[0]), high = _mm512_movepi16_mask(words[1]);
    __m512i codes = _mm512_permutexvar_epi8(index, table);
    codes = _mm512_mask_add_epi8(codes, _cvtu64_mask64(low | high << 32), codes,
                                 _mm512_set1_epi8(8));
    *out = Store(*out, codes, encoder);
  }
  return i;
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_TABLE_VBMI_INL_H_
