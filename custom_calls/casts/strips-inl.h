// Casting along both axes, strip by strip, by the kernels of either: what the second direction
// reads, the first has left in the cache.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_INL_H_

#include "casts/quantize.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// A strip, or some of its columns: first..last - 1 of `inner`.
struct Strip {
  int64_t slice;  // of `columns.outer`
  int64_t block;  // along `columns.length`
  int64_t row;    // its first row, in the slice
  int64_t num_rows;
  int64_t first;
  int64_t last;
};

MX_INLINE Strip StripOf(const QuantizePlan& rows, const QuantizePlan& columns, int64_t index) {
  const int64_t width = StripColumns(rows);
  const int64_t strips = (columns.inner + width - 1) / width;
  const int64_t block = index / strips;
  Strip strip;
  strip.slice = block / columns.blocks_per_row;
  strip.block = block - strip.slice * columns.blocks_per_row;
  strip.row = strip.block * columns.block;
  const int64_t rest = columns.length - strip.row;
  strip.num_rows = rest < columns.block ? rest : columns.block;
  strip.first = (index - block * strips) * width;
  strip.last = strip.first + width < columns.inner ? strip.first + width : columns.inner;
  return strip;
}

using CastKernel = void (*)(const QuantizePlan& plan, int64_t begin, int64_t end);

// The columns of a strip; `first` is where a tile begins.
MX_INLINE void StripTiles(const QuantizePlan& columns, const Strip& strip, CastKernel kernel) {
  const int64_t tiles = (columns.inner + kColumnTile - 1) / kColumnTile;
  const int64_t start = (strip.slice * columns.blocks_per_row + strip.block) * tiles;
  kernel(columns, start + strip.first / kColumnTile,
         start + (strip.last + kColumnTile - 1) / kColumnTile);
}

// The rows of a strip; `first` is where a block begins.
MX_INLINE void StripRows(const QuantizePlan& rows, const QuantizePlan& columns, const Strip& strip,
                         CastKernel kernel) {
  const int64_t first = strip.first / rows.block;
  const int64_t last = (strip.last + rows.block - 1) / rows.block;
  for (int64_t i = 0; i < strip.num_rows; ++i) {
    const int64_t row = strip.slice * columns.length + strip.row + i;
    kernel(rows, row * rows.blocks_per_row + first, row * rows.blocks_per_row + last);
  }
}

template <CastKernel kRows, CastKernel kColumns>
void Both(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Strip strip = StripOf(rows, columns, index);
    StripTiles(columns, strip, kColumns);
    StripRows(rows, columns, strip, kRows);
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_INL_H_
