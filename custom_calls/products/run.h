// A batch of products, cut into tasks: packs both operands into panels, multiplies panel by panel.
//
// One task owns whole tiles and adds along k in ascending order, in slices of fixed length. So the
// bits of a result depend on its row, its column and k alone: not on threads, batch or neighbours.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_RUN_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_RUN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/macros.h"
#include "common/thread_pool.h"
#include "products/problem.h"
#include "products/scratch.h"
#include "products/thin.h"

namespace mx {

// Tiles of one task: rows of panels by rows of panels.
struct Task {
  int64_t lhs_first, lhs_last, rhs_first, rhs_last;  // panels within the slabs
};

struct Slabs {
  const char* lhs;
  const char* rhs;
  int64_t lhs_group, rhs_panel;  // the first of each within the operands
  const ScaleRange* lhs_ranges;  // by group
  const ScaleRange* rhs_ranges;  // by panel
};

// Lines that are about to be written, so that writing does not wait for them.
inline void PrefetchRows(char* out, int rows, int64_t stride) {
#if defined(__GNUC__) || defined(__clang__)
  for (int i = 0; i < rows; ++i) {
    __builtin_prefetch(out + i * stride, 1);
    __builtin_prefetch(out + i * stride + 64, 1);
  }
#else
  (void)out, (void)rows, (void)stride;
#endif
}

// Where a task is: a slice of k, and a panel of each operand.
struct Place {
  int64_t chunk, count, i, j;
};

// A share of what the task reads after this: of the next panel of rhs, or of the first one's next
// slice, and of the next slice of this panel of lhs.
MX_INLINE void PrefetchNext(const Sizes& sizes, const Slabs& slabs, const Task& task,
                            const Place& at) {
  const int64_t wide = task.lhs_last - task.lhs_first, high = task.rhs_last - task.rhs_first;
  const int64_t next = at.chunk + at.count;
  const bool turns = at.j + 1 == task.rhs_last;
  const int64_t chunk = turns ? next : at.chunk, j = turns ? task.rhs_first : at.j + 1;
  PrefetchShare(slabs.rhs + j * sizes.rhs_panel + chunk * sizes.rhs_chunk,
                std::min(at.count, sizes.chunks - chunk) * sizes.rhs_chunk, at.i - task.lhs_first,
                wide);
  PrefetchShare(slabs.lhs + at.i * sizes.lhs_panel + next * sizes.lhs_chunk,
                std::min(at.count, sizes.chunks - next) * sizes.lhs_chunk, at.j - task.rhs_first,
                high);
}

inline void RunTask(const MatmulKernels& kernels, const MatmulProblem& problem, const Sizes& sizes,
                    const Slabs& slabs, const Task& task, int64_t product) {
  constexpr int64_t kTile = kTileRows * kTileColumns;
  const int64_t m = problem.lhs.rows, n = problem.rhs.rows;
  const int64_t width = task.lhs_last - task.lhs_first;
  const bool sliced = sizes.chunks > sizes.slice;
  const int64_t num_tiles = sliced ? width * (task.rhs_last - task.rhs_first) : 1;
  Scratch tiles(num_tiles * kTile * sizeof(float));
  const int64_t out_size = SizeOf(problem.out_type);
  char* out = static_cast<char*>(problem.out) + product * m * n * out_size;
  int64_t chunk = 0;
  do {
    const int64_t count = std::min(sizes.slice, sizes.chunks - chunk);
    const bool last = chunk + count >= sizes.chunks;
    for (int64_t j = task.rhs_first; j < task.rhs_last; ++j) {
      const int64_t column = (slabs.rhs_panel + j) * kTileColumns;
      for (int64_t i = task.lhs_first; i < task.lhs_last; ++i) {
        const int64_t row = slabs.lhs_group * kLhsGroupRows + i * kTileRows;
        if (row >= m) break;
        const int64_t index = sliced ? (j - task.rhs_first) * width + i - task.lhs_first : 0;
        float* tile = reinterpret_cast<float*>(tiles.data()) + index * kTile;
        char* to = out + (row * n + column) * out_size;
        const int num_rows = static_cast<int>(std::min<int64_t>(kTileRows, m - row));
        if (last) PrefetchRows(to, num_rows, n * out_size);
        PrefetchNext(sizes, slabs, task, {chunk, count, i, j});
        const Scaling scaling =
            ChooseScaling(problem.lhs, problem.rhs, slabs.lhs_ranges[i / kLhsPanelsPerGroup],
                          slabs.rhs_ranges[j]);
        kernels.panels[sizes.type]->multiply(
            {problem.lhs.element, problem.rhs.element, num_rows, problem.lhs.block, scaling, count,
             slabs.lhs + i * sizes.lhs_panel + chunk * sizes.lhs_chunk,
             slabs.rhs + j * sizes.rhs_panel + chunk * sizes.rhs_chunk, tile, chunk == 0});
        if (!last) continue;
        StoreTile(kernels, problem, product, tile, num_rows,
                  static_cast<int>(std::min<int64_t>(kTileColumns, n - column)), to);
      }
    }
    chunk += count;
  } while (chunk < sizes.chunks);
}

template <class Pool>
void MultiplySlabs(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem,
                   const Sizes& sizes, const Slabs& slabs, int64_t num_groups, int64_t num_panels,
                   int64_t product) {
  // Lhs panels of a task stay in the second-level cache while rhs panels pass.
  int64_t high = 8, wide = 8;
  const int64_t wanted = pool.num_threads() <= 1 ? 1 : 4 * pool.num_threads();
  auto count = [&] { return ((num_groups + high - 1) / high) * ((num_panels + wide - 1) / wide); };
  while (count() < wanted && (high > 1 || wide > 1)) (wide > 1 ? wide : high) /= 2;
  const int64_t across = (num_groups + high - 1) / high;
  ParallelFor(pool, count(), [&](int64_t index) {
    const int64_t i = index % across * high, j = index / across * wide;
    const Task task = {i * kLhsPanelsPerGroup, std::min(i + high, num_groups) * kLhsPanelsPerGroup,
                       j, std::min(j + wide, num_panels)};
    RunTask(kernels, problem, sizes, slabs, task, product);
  });
}

template <class Pool>
void RunPacked(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem) {
  const PanelType type = ChoosePanels(kernels, problem.lhs.element, problem.rhs.element);
  const Sizes sizes = SizesOf(problem, type);
  const PanelKernels& panels = *kernels.panels[type];
  const int64_t group_bytes = sizes.lhs_panel * kLhsPanelsPerGroup;
  Scratch left(sizes.lhs_per_slab * group_bytes + 64), right(sizes.rhs_per_slab * sizes.rhs_panel);
  std::vector<ScaleRange> left_ranges(sizes.lhs_per_slab), right_ranges(sizes.rhs_per_slab);
  const int64_t num_products = static_cast<int64_t>(problem.products.size());
  for (int64_t product = 0; product < num_products; ++product) {
    const Source lhs = MatrixOf(problem.lhs, problem.products[product].lhs);
    const Source rhs = MatrixOf(problem.rhs, problem.products[product].rhs);
    for (int64_t i = 0; i < sizes.lhs_groups; i += sizes.lhs_per_slab) {
      const int64_t num_groups = std::min(sizes.lhs_per_slab, sizes.lhs_groups - i);
      for (int64_t j = 0; j < sizes.rhs_panels; j += sizes.rhs_per_slab) {
        const int64_t num_panels = std::min(sizes.rhs_per_slab, sizes.rhs_panels - j);
        const int64_t new_groups = j == 0 ? num_groups : 0;
        ParallelFor(pool, new_groups + num_panels, [&](int64_t task) {
          if (task < new_groups) {
            left_ranges[task] = ScaleRange();
            panels.pack_lhs(lhs, (i + task) * kLhsGroupRows, left.data() + task * group_bytes,
                            sizes.lhs_panel, &left_ranges[task]);
          } else {
            task -= new_groups;
            right_ranges[task] = ScaleRange();
            panels.pack_rhs(rhs, (j + task) * kTileColumns,
                            right.data() + task * sizes.rhs_panel, &right_ranges[task]);
          }
        });
        const Slabs slabs = {left.data(), right.data(),       i,
                             j,           left_ranges.data(), right_ranges.data()};
        MultiplySlabs(pool, kernels, problem, sizes, slabs, num_groups, num_panels, product);
      }
    }
  }
}

// Products that share rhs are one product of more rows, where the rows follow each other.
inline void MergeRows(MatmulProblem* problem) {
  const int64_t batch = static_cast<int64_t>(problem->products.size());
  if (batch < 2 || problem->lhs.k_stride != 1 || problem->factors.size() != 1) return;
  for (int64_t i = 0; i < batch; ++i) {
    if (problem->products[i].rhs != 0 || problem->products[i].lhs != i) return;
  }
  problem->lhs.rows *= batch;
  problem->products.resize(1);
}

template <class Pool>
void RunMatmul(Pool& pool, const MatmulKernels& kernels, MatmulProblem problem) {
  MergeRows(&problem);
  const int64_t batch = static_cast<int64_t>(problem.products.size());
  if (batch == 0 || problem.lhs.rows == 0 || problem.rhs.rows == 0) return;
  // Waking another thread costs about what 2^18 products do.
  const int64_t work = problem.lhs.rows * problem.rhs.rows * problem.lhs.k * batch;
  NoPool nobody;
  const bool alone = work < (int64_t{1} << 18), thin = problem.lhs.rows <= kThinRows;
  if (alone) return thin ? RunThin(nobody, kernels, problem) : RunPacked(nobody, kernels, problem);
  thin ? RunThin(pool, kernels, problem) : RunPacked(pool, kernels, problem);
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_RUN_H_
