// Panels of codes of six bits (weights.h), with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PANELS6_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PANELS6_AVX512_INL_H_

#include <immintrin.h>
#include <stdint.h>

#include "common/macros.h"
#include "common/target.h"
#include "products/kernels.h"

namespace mx::MX_TARGET {
namespace {

// Sixteen positions along k of 32 rows: three pairs of vectors, which hold four.
constexpr int kSixBytes = 3 * kTileColumns * 4;

// One word of `first` where the mask has ones, else of `second`.
MX_INLINE __m512i Select(__m512i mask, __m512i first, __m512i second) {
  return _mm512_ternarylogic_epi32(mask, first, second, 0xca);
}

// The last four of sixteen positions, of 16 rows, from bits 6 and 7 of the others; its own bits 6
// and 7 are anything. To shift words does no harm: no byte's bits reach where they count in another.
MX_INLINE __m512i LastOfSixteen(const char* from) {
  constexpr int kStep = kTileColumns * 4;
  const __m512i low = _mm512_srli_epi16(_mm512_load_si512(from), 6);
  const __m512i middle = _mm512_srli_epi16(_mm512_load_si512(from + kStep), 4);
  const __m512i high = _mm512_srli_epi16(_mm512_load_si512(from + 2 * kStep), 2);
  const __m512i both = Select(_mm512_set1_epi8(3), low, middle);
  return Select(_mm512_set1_epi8(15), both, high);
}

// Positions 4 * word .. 4 * word + 3 of 16 rows; bits 6 and 7 are anything.
MX_INLINE __m512i LoadSix(const char* codes, int word) {
  const char* from = codes + word / 4 * kSixBytes;
  return word % 4 == 3 ? LastOfSixteen(from)
                       : _mm512_load_si512(from + word % 4 * kTileColumns * 4);
}

// Sixteen positions of 16 rows, which are codes of six bits and no more, to a panel.
MX_INLINE void StoreSixteen(const __m512i words[4], char* to) {
  const __m512i top = _mm512_set1_epi8((char)0xc0);
  const __m512i parts[3] = {_mm512_slli_epi16(words[3], 6), _mm512_slli_epi16(words[3], 4),
                            _mm512_slli_epi16(words[3], 2)};
  for (int i = 0; i < 3; ++i) {
    _mm512_store_si512(to + i * kTileColumns * 4, Select(top, parts[i], words[i]));
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PANELS6_AVX512_INL_H_
