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

// Rows alone ---------------------------------------------------------------------------------------

// Whole blocks in a run: sixteen at a time, what is left and what is rare as before.
template <class T, int kMantissa>
void WordSegment(const QuantizePlan& plan, const WordCoder& coder, const Segment& segment) {
  static_assert(kGroup * kRowBlock == kGroupRows * kWideColumns, "");
  WideTile tile;
  WordScales scales[2];
  const T* x = static_cast<const T*>(plan.x) + segment.start;
  const int64_t groups = segment.count / kGroup;
  // Finding scales takes long and keeps few units busy: the group before is encoded meanwhile.
  for (int64_t i = 0; i <= groups; ++i) {
    const int64_t slot = i % 2;
    if (i < groups) {
      const T* from = x + i * kGroup * kRowBlock - slot * kGroupRows * kWideColumns;
      FillRows<T, kMantissa, false>(from, kWideColumns, slot * kGroupRows, (slot + 1) * kGroupRows,
                                    &tile);
      FindRowScales(tile, slot * kGroupRows, coder, &scales[slot]);
    }
    if (i == 0) continue;
    const int64_t done = (i - 1) * kGroup, block = segment.block + done;
    if (MX_UNLIKELY(!scales[1 - slot].usual)) {
      avx512::kQuantize.rows(plan, block, block + kGroup);
      continue;
    }
    const RowsPlace place = {plan.codes + segment.start + done * kRowBlock, kWideColumns,
                             static_cast<uint8_t*>(plan.scales) + block, kWideVectors};
    EncodeTileRows<kMantissa, false>(tile, (1 - slot) * kGroupRows, scales[1 - slot], coder, place);
  }
  const int64_t done = groups * kGroup;
  if (done >= segment.count) return;
  avx512::kQuantize.rows(plan, segment.block + done, segment.block + segment.count);
}

template <class T, int kMantissa>
void WordRows(const QuantizePlan& plan, int64_t begin, int64_t end) {
  const WordCoder coder = WordCoderOf(plan);
  ForRuns(
      plan, plan.length % kRowBlock == 0, begin, end,
      [&](int64_t block, int64_t count, int64_t, int64_t start) {
        WordSegment<T, kMantissa>(plan, coder, {block, count, start, nullptr});
      },
      [&](int64_t block) { avx512::kQuantize.rows(plan, block, block + 1); });
}

// Columns alone ------------------------------------------------------------------------------------

template <class T, int kMantissa, bool kStream>
void WordColumns(const QuantizePlan& plan, int64_t begin, int64_t end) {
  const WordCoder coder = WordCoderOf(plan);
  WideTile tile;
  while (begin < end) {
    const ColumnPlace place = PlaceOf(plan, begin);
    const int64_t column = place.scale % plan.inner;
    if (begin + 2 > end || column + kWideColumns > plan.inner) {
      avx512::kQuantize.columns(plan, begin, begin + 1);
      ++begin;
      continue;
    }
    const T* x = static_cast<const T*>(plan.x) + place.start;
    FillRows<T, kMantissa, true>(x, plan.inner, 0, place.rows, &tile);
    uint8_t* codes = plan.codes + place.start;
    uint8_t* scales = static_cast<uint8_t*>(plan.scales) + place.scale;
    if (MX_UNLIKELY((!EncodeTileColumns<kMantissa, kStream>(tile, place.rows, coder, codes,
                                                            plan.inner, scales)))) {
      avx512::kQuantize.columns(plan, begin, begin + 2);
    }
    begin += 2;
  }
  if (kStream) _mm_sfence();
}

// Both ---------------------------------------------------------------------------------------------

// What both directions of a strip need.
struct Pair {
  const QuantizePlan& rows;
  const QuantizePlan& columns;
  WordCoder row_coder;
  WordCoder column_coder;
};

// The rows of a wide tile, kGroupRows at a time; `start` is its first element, `block` the index of
// its first block along the rows.
template <class T, int kMantissa, bool kStream>
MX_INLINE void WideTileRows(const Pair& pair, int64_t start, int64_t block, int64_t num_rows,
                            WideTile* tile) {
  const QuantizePlan& rows = pair.rows;
  const int64_t stride = pair.columns.inner;
  const T* x = static_cast<const T*>(rows.x) + start;
  WordScales scales[2];
  for (int64_t i = 0; i <= num_rows; i += kGroupRows) {
    const int64_t slot = i / kGroupRows % 2;
    if (i < num_rows) {
      FillRows<T, kMantissa, true>(x, stride, i, i + kGroupRows, tile);
      FindRowScales(*tile, i, pair.row_coder, &scales[slot]);
    }
    if (i == 0) continue;
    const int64_t row = i - kGroupRows, first = block + row * rows.blocks_per_row;
    if (MX_LIKELY(scales[1 - slot].usual)) {
      const RowsPlace place = {rows.codes + start + row * stride, stride,
                               static_cast<uint8_t*>(rows.scales) + first, rows.blocks_per_row};
      EncodeTileRows<kMantissa, kStream>(*tile, row, scales[1 - slot], pair.row_coder, place);
      continue;
    }
    for (int64_t j = 0; j < kGroupRows; ++j) {
      const int64_t at = first + j * rows.blocks_per_row;
      avx512::kQuantize.rows(rows, at, at + kWideVectors);
    }
  }
}

// Whole wide tiles of a strip; returns the first column that is left.
template <class T, int kMantissa, bool kStream>
int64_t WideTiles(const Pair& pair, const Strip& strip, WideTile* tile) {
  const QuantizePlan& columns = pair.columns;
  const int64_t row = strip.slice * columns.length + strip.row;
  const int64_t scale_row = strip.slice * columns.blocks_per_row + strip.block;
  Strip part = strip;
  for (; part.first + kWideColumns <= strip.last; part.first += kWideColumns) {
    part.last = part.first + kWideColumns;
    const int64_t start = row * columns.inner + part.first;
    const int64_t block = row * pair.rows.blocks_per_row + part.first / kRowBlock;
    WideTileRows<T, kMantissa, kStream>(pair, start, block, strip.num_rows, tile);
    uint8_t* scales =
        static_cast<uint8_t*>(columns.scales) + scale_row * columns.inner + part.first;
    if (MX_UNLIKELY((!EncodeTileColumns<kMantissa, kStream>(*tile, strip.num_rows,
                                                            pair.column_coder,
                                                            columns.codes + start, columns.inner,
                                                            scales)))) {
      StripTiles(columns, part, avx512::kQuantize.columns);
    }
  }
  return part.first;
}

template <class T, int kMantissa, bool kStream>
void WordBoth(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin, int64_t end) {
  const Pair pair = {rows, columns, WordCoderOf(rows), WordCoderOf(columns)};
  WideTile tile;
  for (int64_t index = begin; index < end; ++index) {
    Strip strip = StripOf(rows, columns, index);
    if (strip.num_rows % kGroupRows == 0) {
      strip.first = WideTiles<T, kMantissa, kStream>(pair, strip, &tile);
    }
    if (strip.first >= strip.last) continue;
    StripTiles(columns, strip, avx512::kQuantize.columns);
    StripRows(rows, columns, strip, avx512::kQuantize.rows);
  }
  if (kStream) _mm_sfence();
}

// Any plan ------------------------------------------------------------------------------------------

template <int kMantissa, bool kStream>
struct Format {
  static constexpr int mantissa = kMantissa;
  static constexpr bool stream = kStream;
};

// Calls `run` with a plan's mantissa bits and whether its codes go past the caches.
template <class Run>
MX_INLINE void ByFormat(const QuantizePlan& plan, bool streams, const Run& run) {
  switch (plan.element.mantissa_bits) {
    case 1:
      return streams ? run(Format<1, true>()) : run(Format<1, false>());
    case 2:
      return streams ? run(Format<2, true>()) : run(Format<2, false>());
    default:
      return streams ? run(Format<3, true>()) : run(Format<3, false>());
  }
}

// Whether the table of E2M1 speeds a plan's rows up.
MX_INLINE bool RowsSuitTable(const QuantizePlan& plan) {
  return WayOf(plan) == Way::kFloatWide && IsE2m1(plan.element) && RowsSuitVectors(plan);
}

void VbmiRows(const QuantizePlan& plan, int64_t begin, int64_t end) {
  if (plan.block == kRowBlock && SuitsWords(plan)) {
    return ByType(plan.type, [&](auto x) {
      ByFormat(plan, false, [&](auto format) {
        WordRows<decltype(x), format.mantissa>(plan, begin, end);
      });
    });
  }
  (RowsSuitTable(plan) ? VectorRows : avx512::kQuantize.rows)(plan, begin, end);
}

void VbmiColumns(const QuantizePlan& plan, int64_t begin, int64_t end) {
  if (plan.block > kWideRows || !SuitsWords(plan)) {
    return avx512::kQuantize.columns(plan, begin, end);
  }
  ByType(plan.type, [&](auto x) {
    ByFormat(plan, Streams(plan), [&](auto format) {
      WordColumns<decltype(x), format.mantissa, format.stream>(plan, begin, end);
    });
  });
}

void VbmiBoth(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin, int64_t end) {
  const bool same = rows.element.mantissa_bits == columns.element.mantissa_bits;
  if (same && rows.block == kRowBlock && columns.block <= kWideRows && SuitsWords(rows) &&
      SuitsWords(columns)) {
    return ByType(rows.type, [&](auto x) {
      ByFormat(rows, Streams(rows) && Streams(columns), [&](auto format) {
        WordBoth<decltype(x), format.mantissa, format.stream>(rows, columns, begin, end);
      });
    });
  }
  if (!RowsSuitTable(rows)) return avx512::kQuantize.both(rows, columns, begin, end);
  VectorStrips(rows, columns, begin, end, avx512::kQuantize.rows, avx512::kQuantize.columns);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_WORDS_VBMI_INL_H_
