// Where two-dimensional blocks lie, of either cast. Included by kernels: see target.h.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_SQUARES_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_SQUARES_H_

#include <stdint.h>

#include "common/macros.h"

namespace mx {

// Where one lies.
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

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_SQUARES_H_
