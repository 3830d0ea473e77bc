// Where that lies which a task of a cast takes, in either direction. Included by kernels: see
// target.h.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_PLACES_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_PLACES_H_

#include <stdint.h>

#include "casts/quantize.h"
#include "common/macros.h"

namespace mx {

// The tensor scale of a slice of `outer`, or null.
template <class Plan>
MX_INLINE const float* TensorScale(const Plan& plan, int64_t outer) {
  if (plan.tensor_scales == nullptr) return nullptr;
  return plan.tensor_scales + outer / (plan.outer / plan.num_tensor_scales);
}

// A two-dimensional block.
struct Square {
  int64_t slice;
  int64_t start;  // its first element
  int64_t rows;
  int64_t columns;
};

template <class Plan>
MX_INLINE Square SquareOf(const Plan& plan, int64_t index) {
  const int64_t squares = (plan.rows + plan.block_rows - 1) / plan.block_rows * plan.blocks_per_row;
  Square square;
  square.slice = index / squares;
  const int64_t inside = index - square.slice * squares;
  const int64_t row = inside / plan.blocks_per_row * plan.block_rows;
  const int64_t column = inside % plan.blocks_per_row * plan.block;
  square.rows = plan.rows - row < plan.block_rows ? plan.rows - row : plan.block_rows;
  square.columns = plan.length - column < plan.block ? plan.length - column : plan.block;
  square.start = (square.slice * plan.rows + row) * plan.length + column;
  return square;
}

// A tile of columns.
struct ColumnPlace {
  int64_t slice;    // of `outer`
  int64_t start;    // its first element
  int64_t scale;    // its first scale
  int64_t rows;     // of its block
  int64_t columns;  // at most kColumnTile
};

template <class Plan>
MX_INLINE ColumnPlace PlaceOf(const Plan& plan, int64_t index) {
  const int64_t tiles = (plan.inner + kColumnTile - 1) / kColumnTile;
  const int64_t block = index / tiles;
  const int64_t column = (index - block * tiles) * kColumnTile;
  const int64_t left = plan.inner - column;
  ColumnPlace place;
  place.slice = block / plan.blocks_per_row;
  const int64_t first = (block - place.slice * plan.blocks_per_row) * plan.block;
  place.rows = plan.length - first < plan.block ? plan.length - first : plan.block;
  place.columns = left < kColumnTile ? left : kColumnTile;
  place.start = (place.slice * plan.length + first) * plan.inner + column;
  place.scale = block * plan.inner + column;
  return place;
}

// Blocks begin..end - 1 along rows: run(block, count, row, start) for whole ones side by side, from
// element `start` on, over the ends of rows where `flat`; rest(block) for one that a row's end cuts.
template <class Plan, class Run, class Rest>
MX_INLINE void ForRuns(const Plan& plan, bool flat, int64_t begin, int64_t end, const Run& run,
                       const Rest& rest) {
  const int64_t full = plan.length / plan.block;
  while (begin < end) {
    const int64_t row = begin / plan.blocks_per_row;
    const int64_t first = begin - row * plan.blocks_per_row;
    const int64_t stop = flat ? first + (end - begin) : full;
    const int64_t count = stop - first < end - begin ? stop - first : end - begin;
    if (count > 0) {
      run(begin, count, row, row * plan.length + first * plan.block);
      begin += count;
    } else {
      rest(begin++);
    }
  }
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_PLACES_H_
