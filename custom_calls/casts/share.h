// How casts are shared between threads.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_SHARE_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_SHARE_H_

#include <algorithm>
#include <cstdint>

#include "casts/quantize.h"
#include "common/thread_pool.h"

namespace mx {

// A task's elements: large enough to hide the handing over, small enough to balance threads.
constexpr int64_t kTaskElements = 1 << 15;

// Runs squares(begin, end) over two-dimensional blocks.
template <class Pool, class Plan, class Kernels>
void ShareSquares(Pool& pool, const Plan& plan, const Kernels& kernels) {
  const int64_t blocks =
      plan.outer * ((plan.rows + plan.block_rows - 1) / plan.block_rows) * plan.blocks_per_row;
  const int64_t elements = std::max<int64_t>(
      std::min(plan.block_rows, plan.rows) * std::min(plan.block, plan.length), 1);
  const int64_t step = std::max<int64_t>(kTaskElements / elements, 1);
  ParallelFor(pool, (blocks + step - 1) / step, [&](int64_t task) {
    kernels.squares(plan, task * step, std::min((task + 1) * step, blocks));
  });
}

// Runs rows(begin, end) over the blocks of a plan, or columns(begin, end) over its tiles.
template <class Pool, class Plan, class Kernels>
void ShareBlocks(Pool& pool, const Plan& plan, const Kernels& kernels) {
  if (plan.block_rows != 0) return ShareSquares(pool, plan, kernels);
  const bool rows = plan.inner == 1;
  const int64_t tiles = rows ? 1 : (plan.inner + kColumnTile - 1) / kColumnTile;
  const int64_t units = plan.outer * plan.blocks_per_row * tiles;
  const int64_t unit_elements = std::max<int64_t>(
      std::min(plan.block, plan.length) * (rows ? 1 : std::min(plan.inner, kColumnTile)), 1);
  const int64_t step = std::max<int64_t>(kTaskElements / unit_elements, 1);
  ParallelFor(pool, (units + step - 1) / step, [&](int64_t task) {
    const int64_t begin = task * step, end = std::min(begin + step, units);
    rows ? kernels.rows(plan, begin, end) : kernels.columns(plan, begin, end);
  });
}

// Runs both(begin, end) over the strips of two plans.
template <class Pool, class Kernels>
void ShareStrips(Pool& pool, const QuantizePlan& rows, const QuantizePlan& columns,
                 const Kernels& kernels) {
  const int64_t width = StripColumns(rows);
  const int64_t strips =
      columns.outer * columns.blocks_per_row * ((columns.inner + width - 1) / width);
  const int64_t strip_elements = std::max<int64_t>(
      std::min(columns.block, columns.length) * std::min(columns.inner, width), 1);
  const int64_t step = std::max<int64_t>(kTaskElements / strip_elements, 1);
  ParallelFor(pool, (strips + step - 1) / step, [&](int64_t task) {
    kernels.both(rows, columns, task * step, std::min((task + 1) * step, strips));
  });
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_SHARE_H_
