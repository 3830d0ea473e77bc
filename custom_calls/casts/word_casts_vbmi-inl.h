// Casts by words (words_vbmi-inl.h) of a whole array: along rows, along columns, along both.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_WORD_CASTS_VBMI_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_WORD_CASTS_VBMI_INL_H_

#include "casts/words_vbmi-inl.h"

namespace mx::MX_TARGET {
namespace {

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

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_WORD_CASTS_VBMI_INL_H_
