// Rounding by 16-bit words and a table: for float elements whose scales are powers of two.
//
// A power-of-two scale moves the exponent of a value and nothing else. So all that does not depend
// on the scale is done once, whatever the number of directions that the array is cast in. With p the
// mantissa bits of a code, each magnitude becomes two words:
//
//   rounded  8 bits of exponent and p of mantissa, to nearest even: for every value that a normal
//            code stands for, the code is this less a constant of the block
//   precise  8 bits of exponent, p + 1 of mantissa, and a last bit for whatever lies below, less
//            another constant: the index into a table of the subnormal codes
//
// Both differences saturate at 0, and the code is the larger of the two.
//
// Part of avx512_vbmi, which takes the rest from avx512.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_WORDS_VBMI_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_WORDS_VBMI_INL_H_

#include "casts/strips_avx512-inl.h"
#include "casts/table_vbmi-inl.h"

namespace mx::MX_TARGET {
namespace {

constexpr int64_t kWords = 32;         // of a vector
constexpr int64_t kWideVectors = 4;    // of a row of a wide tile
constexpr int64_t kWideColumns = kWideVectors * kWords;
constexpr int64_t kWideRows = 64;
constexpr int64_t kRowBlock = 32;      // of rows: a vector of words
constexpr int64_t kGroupRows = kGroup / kWideVectors;  // rows of a wide tile with kGroup blocks

// See QuantizePlan::streams.
template <bool kStream>
MX_INLINE void StoreLine(uint8_t* out, __m512i codes) {
  if (kStream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), codes);
  } else {
    _mm512_storeu_si512(out, codes);
  }
}

struct WideTile {
  alignas(64) uint16_t precise[kWideRows * kWideColumns];
  alignas(64) uint16_t rounded[kWideRows * kWideColumns];
  alignas(64) uint32_t negative[kWideRows * kWideVectors];
};

// Constants of a plan.
struct WordCoder {
  __m512i low_table, high_table, last_entry, top, sign, order;
  __m512i raise, emax, nan, rounded_shift, precise_shift, rounded_base, precise_base;
};

// Codes of what lies below the smallest normal, by `precise` words less that of half the smallest
// code: the same for all formats with p mantissa bits.
struct Subnormals {
  alignas(64) uint8_t codes[3][128] = {};
  constexpr Subnormals() {
    for (int32_t p = 1; p <= 3; ++p) {
      for (int32_t i = 0; i < 128; ++i) {
        // In quarters of the last bit of `precise`, whose octave is i >> (p + 2), or more.
        const int32_t octave = i >> (p + 2), significand = (4 << p) + (i & ((4 << p) - 1));
        const int32_t shift = p + 3 - (octave < p ? octave : p);  // to codes
        const int32_t floor = significand >> shift, half = 1 << (shift - 1);
        const int32_t rest = significand - (floor << shift);
        const bool up = rest > half || (rest == half && floor % 2 != 0);
        codes[p - 1][i] = static_cast<uint8_t>(octave > p ? 1 << p : floor + (up ? 1 : 0));
      }
    }
  }
};
constexpr Subnormals kSubnormals;

// Whether the words keep all that a plan needs of a value and of its scale.
MX_INLINE bool SuitsWords(const QuantizePlan& plan) {
  const int32_t p = plan.element.mantissa_bits;
  if (!SuitsVectors(plan) || WayOf(plan) != Way::kFloat || p < 1 || p > 3) return false;
  return (plan.rule.threshold & ((1 << (22 - p)) - 1)) <= 1;
}

MX_INLINE WordCoder WordCoderOf(const QuantizePlan& plan) {
  const ElementFormat& element = plan.element;
  const int32_t p = element.mantissa_bits;
  const uint8_t* table = kSubnormals.codes[p - 1];
  const int32_t threshold = (plan.rule.threshold >> (22 - p)) * 2 + (plan.rule.threshold & 1);
  WordCoder coder;
  coder.low_table = _mm512_load_si512(table);
  coder.high_table = _mm512_load_si512(table + 64);
  coder.last_entry = _mm512_set1_epi8(p == 3 ? 127 : 63);
  coder.top = _mm512_set1_epi8(static_cast<char>(element.max_code));
  coder.sign = _mm512_set1_epi8(static_cast<char>(element.sign_code));
  coder.order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  coder.raise = Set((4 << p) - threshold);
  coder.emax = Set(element.emax);
  coder.nan = Set(255 << (p + 2));
  coder.rounded_shift = Set(p);
  coder.precise_shift = Set(p + 2);
  coder.rounded_base = Set(element.emin - 1);
  coder.precise_base = Set(element.emin - p - 1);
  return coder;
}

template <class T>
MX_INLINE __m512i LoadWords(const T* x) {
  return CutToWords(_mm512_castps_si512(Load(x)), _mm512_castps_si512(Load(x + kLanes)));
}
MX_INLINE __m512i LoadWords(const Bf16* x) { return _mm512_loadu_si512(x); }

// One vector of a tile's row.
template <int kMantissa>
MX_INLINE void FillWords(__m512i words, int64_t vector, WideTile* tile) {
  constexpr int kDrop = 5 - kMantissa;
  constexpr int32_t kBelow = ((1 << kDrop) - 1) * 0x00010001;
  const __m512i sticky = _mm512_add_epi16(_mm512_and_si512(words, Set(kBelow)), Set(kBelow));
  const __m512i magnitude = _mm512_ternarylogic_epi32(words, sticky, Set(0x7fff7fff), 0xa8);
  const __m512i precise = _mm512_srli_epi16(magnitude, kDrop);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(precise, 2), Set(0x00010001));
  const __m512i rounded = _mm512_srli_epi16(_mm512_avg_epu16(precise, odd), 1);
  _mm512_store_si512(tile->precise + vector * kWords, precise);
  _mm512_store_si512(tile->rounded + vector * kWords, rounded);
  tile->negative[vector] = _mm512_movepi16_mask(words);
}

// Rows first..last - 1 of a tile. kStrided: they lie apart, and the tile to the right comes next.
template <class T, int kMantissa, bool kStrided>
MX_INLINE void FillRows(const T* x, int64_t stride, int64_t first, int64_t last, WideTile* tile) {
  for (int64_t i = first; i < last; ++i) {
    const T* row = x + i * stride;
    if (kStrided) {
      const char* next = reinterpret_cast<const char*>(row + kWideColumns);
      for (size_t at = 0; at < kWideColumns * sizeof(T); at += 64) {
        _mm_prefetch(next + at, _MM_HINT_T1);
      }
    }
    for (int64_t v = 0; v < kWideVectors; ++v) {
      FillWords<kMantissa>(LoadWords(row + v * kWords), i * kWideVectors + v, tile);
    }
  }
}

// Scales of sixteen blocks.
struct WordScales {
  alignas(64) uint32_t rounded[kGroup];  // what to subtract, twice in each lane
  alignas(64) uint32_t precise[kGroup];
  __m128i stored;
  bool usual;  // no NaN, and far from the subnormals of float32
};

MX_INLINE void FindScalesOfWords(__m256i amax_words, const WordCoder& coder, WordScales* scales) {
  const __m512i amax = _mm512_cvtepu16_epi32(amax_words);
  const __m512i raised = _mm512_srlv_epi32(_mm512_add_epi32(amax, coder.raise), coder.precise_shift);
  __m512i bytes = _mm512_sub_epi32(raised, coder.emax);
  bytes = _mm512_min_epi32(_mm512_max_epi32(bytes, Set(0)), Set(254));
  const __mmask16 low = _mm512_cmplt_epi32_mask(bytes, Set(kSmallestByteForWords));
  const __mmask16 tiny = _mm512_mask_test_epi32_mask(low, amax, amax);
  scales->usual = (tiny | _mm512_cmpge_epi32_mask(amax, coder.nan)) == 0;
  scales->stored = _mm512_cvtepi32_epi8(bytes);
  const __m512i rounded =
      _mm512_sllv_epi32(_mm512_add_epi32(bytes, coder.rounded_base), coder.rounded_shift);
  const __m512i precise =
      _mm512_sllv_epi32(_mm512_add_epi32(bytes, coder.precise_base), coder.precise_shift);
  // Blocks of zeros have negative ones, which are large as words: all saturates to 0.
  _mm512_store_si512(scales->rounded, Twice(rounded));
  _mm512_store_si512(scales->precise, Twice(precise));
}

// Sixteen vectors of words, side by side in memory, to their maxima.
MX_INLINE __m256i MaximaOfWords(const uint16_t* words) {
  __m512i pair[8], quad[4], eight[2];
  for (int i = 0; i < 8; ++i) {
    const __m512i a = _mm512_load_si512(words + 2 * i * kWords);
    const __m512i b = _mm512_load_si512(words + (2 * i + 1) * kWords);
    pair[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    quad[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(pair[2 * i], pair[2 * i + 1]),
                               _mm512_unpackhi_epi32(pair[2 * i], pair[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i) {
    eight[i] = _mm512_max_epu16(_mm512_unpacklo_epi64(quad[2 * i], quad[2 * i + 1]),
                                _mm512_unpackhi_epi64(quad[2 * i], quad[2 * i + 1]));
  }
  // Each quarter of eight[i] holds partial maxima of vectors 8 i .. 8 i + 7.
  const __m512i halves = _mm512_max_epu16(_mm512_shuffle_i32x4(eight[0], eight[1], 0x88),
                                          _mm512_shuffle_i32x4(eight[0], eight[1], 0xdd));
  const __m512i all = _mm512_max_epu16(_mm512_shuffle_i32x4(halves, halves, 0x88),
                                       _mm512_shuffle_i32x4(halves, halves, 0xdd));
  return _mm512_castsi512_si256(all);
}

// Two vectors of words with what to subtract from them, to 64 codes.
struct Subtrahends {
  __m512i rounded[2], precise[2];
};

template <int kMantissa>
MX_INLINE __m512i CodesOfWords(const WideTile& tile, int64_t vector, const Subtrahends& less,
                               const WordCoder& coder) {
  const __m512i* rounded = reinterpret_cast<const __m512i*>(tile.rounded + vector * kWords);
  const __m512i* precise = reinterpret_cast<const __m512i*>(tile.precise + vector * kWords);
  const __m512i normal = _mm512_packus_epi16(_mm512_subs_epu16(rounded[0], less.rounded[0]),
                                             _mm512_subs_epu16(rounded[1], less.rounded[1]));
  __m512i index = _mm512_packus_epi16(_mm512_subs_epu16(precise[0], less.precise[0]),
                                      _mm512_subs_epu16(precise[1], less.precise[1]));
  index = _mm512_min_epu8(index, coder.last_entry);
  const __m512i subnormal =
      kMantissa == 3 ? _mm512_permutex2var_epi8(coder.low_table, index, coder.high_table)
                     : _mm512_permutexvar_epi8(index, coder.low_table);
  __m512i codes = _mm512_min_epu8(_mm512_max_epu8(normal, subnormal), coder.top);
  codes = _mm512_permutexvar_epi64(coder.order, codes);
  uint64_t negative;
  memcpy(&negative, tile.negative + vector, sizeof negative);
  return _mm512_mask_add_epi8(codes, _cvtu64_mask64(negative), codes, coder.sign);
}

// Where kGroupRows rows of a tile go, which are kGroup blocks along the rows.
struct RowsPlace {
  uint8_t* codes;
  int64_t row_bytes;  // from row to row
  uint8_t* scales;
  int64_t row_scales;
};

MX_INLINE void FindRowScales(const WideTile& tile, int64_t row, const WordCoder& coder,
                             WordScales* scales) {
  FindScalesOfWords(MaximaOfWords(tile.precise + row * kWideColumns), coder, scales);
}

template <int kMantissa, bool kStream>
MX_INLINE void EncodeTileRows(const WideTile& tile, int64_t row, const WordScales& scales,
                              const WordCoder& coder, RowsPlace place) {
  alignas(16) uint8_t stored[kGroup];
  _mm_store_si128(reinterpret_cast<__m128i*>(stored), scales.stored);
  for (int64_t i = 0; i < kGroupRows; ++i) {
    memcpy(place.scales + i * place.row_scales, stored + i * kWideVectors, kWideVectors);
    uint8_t* out = place.codes + i * place.row_bytes;
    for (int64_t v = 0; v < kWideVectors; v += 2) {
      const int64_t block = i * kWideVectors + v;
      Subtrahends less;
      for (int j = 0; j < 2; ++j) {
        less.rounded[j] = Set(static_cast<int32_t>(scales.rounded[block + j]));
        less.precise[j] = Set(static_cast<int32_t>(scales.precise[block + j]));
      }
      const __m512i codes =
          CodesOfWords<kMantissa>(tile, row * kWideVectors + block, less, coder);
      StoreLine<kStream>(out, codes);
      out += 64;
    }
  }
}

MX_INLINE __m512i JoinWords(const uint32_t* low, const uint32_t* high) {
  const __m256i a = _mm512_cvtepi32_epi16(_mm512_load_si512(low));
  const __m256i b = _mm512_cvtepi32_epi16(_mm512_load_si512(high));
  return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

// The first rows of a tile as blocks along the columns; false where a block needs care.
template <int kMantissa, bool kStream>
MX_INLINE bool EncodeTileColumns(const WideTile& tile, int64_t rows, const WordCoder& coder,
                                 uint8_t* codes, int64_t stride, uint8_t* stored) {
  __m512i amax[kWideVectors];
  for (int64_t v = 0; v < kWideVectors; ++v) amax[v] = Set(0);
  for (int64_t i = 0; i < rows * kWideVectors; i += kWideVectors) {
    for (int64_t v = 0; v < kWideVectors; ++v) {
      amax[v] = _mm512_max_epu16(amax[v], _mm512_load_si512(tile.precise + (i + v) * kWords));
    }
  }
  Subtrahends less[kWideVectors / 2];
  for (int64_t v = 0; v < kWideVectors; ++v) {
    WordScales low, high;
    FindScalesOfWords(_mm512_castsi512_si256(amax[v]), coder, &low);
    FindScalesOfWords(_mm512_extracti64x4_epi64(amax[v], 1), coder, &high);
    if (MX_UNLIKELY(!low.usual || !high.usual)) return false;
    less[v / 2].rounded[v % 2] = JoinWords(low.rounded, high.rounded);
    less[v / 2].precise[v % 2] = JoinWords(low.precise, high.precise);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(stored + v * kWords), low.stored);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(stored + v * kWords + kGroup), high.stored);
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t v = 0; v < kWideVectors; v += 2) {
      const __m512i row = CodesOfWords<kMantissa>(tile, i * kWideVectors + v, less[v / 2], coder);
      StoreLine<kStream>(codes + i * stride + v * kWords, row);
    }
  }
  return true;
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_WORDS_VBMI_INL_H_
