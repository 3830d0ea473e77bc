// A batch of products, cut into tasks: packs both operands into panels, multiplies panel by panel.
//
// One task owns whole tiles and adds along k in ascending order, in slices of fixed length. So the
// bits of a result depend on its row, its column and k alone: not on threads, batch or neighbours.
#ifndef MX_JAX_CUSTOM_CALLS_CPU_MATMUL_RUN_H_
#define MX_JAX_CUSTOM_CALLS_CPU_MATMUL_RUN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/thread_pool.h"
#include "cpu/matmul_kernels.h"
#include "cpu/scratch.h"

namespace mx {

// Which matrix of each operand.
struct Product {
  int64_t lhs, rhs;
};

struct MatmulProblem {
  Source lhs, rhs;  // the first matrix of each; others follow without gaps
  std::vector<Product> products;
  const float* alpha;  // the factor of each product, alpha_step apart
  int64_t alpha_step;
  OutType out_type;
  void* out;  // [products, lhs.rows, rhs.rows]
};

inline bool FitsInt8(Element element) {
  return element == kE2M1 || element == kE2M3 || element == kElementInt8;
}
inline bool FitsInt16(Element element) { return FitsInt8(element) || element == kE3M2; }
inline bool FitsBf16(Element element) {
  return element != kElementFloat32 && element != kElementF16;
}

// The fastest type of panel that holds both operands exactly.
inline PanelType ChoosePanels(const MatmulKernels& kernels, Element lhs, Element rhs) {
  if (kernels.has[kInt8] && FitsInt8(lhs) && FitsInt8(rhs)) return kInt8;
  if (kernels.has[kBf16] && FitsBf16(lhs) && FitsBf16(rhs)) return kBf16;
  if (kernels.has[kInt16] && FitsInt16(lhs) && FitsInt16(rhs)) return kInt16;
  return kFloat32;
}

inline Scaling ChooseScaling(const Source& lhs, const Source& rhs, const ScaleRange& left,
                             const ScaleRange& right) {
  if (lhs.scale_kind == kScaleE4M3 || rhs.scale_kind == kScaleE4M3) return kProduct;
  // Room for the elements' factors, at most 2^-12, and for the blocks' sums.
  const int low = std::min(left.low, 0) + std::min(right.low, 0);
  const int high = std::max(left.high, 0) + std::max(right.high, 0);
  const bool each = left.low >= -110 && right.low >= -110 && left.high < 128 && right.high < 128;
  return each && low >= -110 && high <= 120 ? kNormal : kWide;
}

struct Sizes {
  PanelType type;
  int64_t chunks, slice;               // of k
  int64_t lhs_panel, rhs_panel;        // bytes
  int64_t lhs_chunk, rhs_chunk;        // bytes
  int64_t lhs_groups, rhs_panels;      // in the whole operand
  int64_t lhs_per_slab, rhs_per_slab;  // groups and panels packed at a time
};

inline Sizes SizesOf(const MatmulProblem& problem, PanelType type) {
  // Slices of an rhs panel that fill half of a first-level cache; packed operands of 16 MiB.
  constexpr int64_t kSlice[kNumPanelTypes] = {16, 8, 8, 4};
  constexpr int64_t kSlabBytes = int64_t{16} << 20;
  Sizes sizes;
  sizes.type = type;
  sizes.chunks = (problem.lhs.k + kChunk - 1) / kChunk;
  sizes.slice = kSlice[type];
  sizes.lhs_chunk = ChunkBytes(type, problem.lhs.block, kTileRows, true);
  sizes.rhs_chunk = ChunkBytes(type, problem.lhs.block, kTileColumns, false);
  sizes.lhs_panel = (sizes.chunks * sizes.lhs_chunk + 64 + 63) / 64 * 64;
  sizes.rhs_panel = sizes.chunks * sizes.rhs_chunk;
  sizes.lhs_groups = (problem.lhs.rows + kLhsGroupRows - 1) / kLhsGroupRows;
  sizes.rhs_panels = (problem.rhs.rows + kTileColumns - 1) / kTileColumns;
  const int64_t group_bytes = sizes.lhs_panel * kLhsPanelsPerGroup;
  sizes.lhs_per_slab = std::min(
      sizes.lhs_groups, std::max<int64_t>(1, kSlabBytes / std::max<int64_t>(1, group_bytes)));
  sizes.rhs_per_slab = std::min(
      sizes.rhs_panels, std::max<int64_t>(1, kSlabBytes / std::max<int64_t>(1, sizes.rhs_panel)));
  return sizes;
}

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

inline void RunTask(const MatmulKernels& kernels, const MatmulProblem& problem, const Sizes& sizes,
                    const Slabs& slabs, const Task& task, int64_t product) {
  constexpr int64_t kTile = kTileRows * kTileColumns;
  const int64_t m = problem.lhs.rows, n = problem.rhs.rows;
  const int64_t width = task.lhs_last - task.lhs_first;
  const bool sliced = sizes.chunks > sizes.slice;
  const int64_t num_tiles = sliced ? width * (task.rhs_last - task.rhs_first) : 1;
  Scratch tiles(num_tiles * kTile * sizeof(float));
  const int64_t out_size = problem.out_type == kOutFloat32 ? 4 : 2;
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
        const Scaling scaling =
            ChooseScaling(problem.lhs, problem.rhs, slabs.lhs_ranges[i / kLhsPanelsPerGroup],
                          slabs.rhs_ranges[j]);
        kernels.multiply(sizes.type, num_rows, problem.lhs.block, scaling, count,
                         slabs.lhs + i * sizes.lhs_panel + chunk * sizes.lhs_chunk,
                         slabs.rhs + j * sizes.rhs_panel + chunk * sizes.rhs_chunk, tile,
                         chunk == 0);
        if (!last) continue;
        kernels.store(tile, num_rows, static_cast<int>(std::min<int64_t>(kTileColumns, n - column)),
                      problem.alpha[product * problem.alpha_step], problem.out_type, to, n);
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

inline int64_t ElementBytes(Element element) {
  return element <= kElementInt8 ? 1 : element == kElementFloat32 ? 4 : 2;
}

inline Source MatrixOf(const Source& source, int64_t index) {
  Source moved = source;
  const int64_t bytes = source.rows * source.k * ElementBytes(source.element);
  moved.elements = static_cast<const char*>(source.elements) + index * bytes;
  const int64_t blocks = (source.k + source.block - 1) / source.block;
  if (source.scales != nullptr) moved.scales = source.scales + index * source.rows * blocks;
  return moved;
}

template <class Pool>
void RunPacked(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem) {
  const PanelType type = ChoosePanels(kernels, problem.lhs.element, problem.rhs.element);
  const Sizes sizes = SizesOf(problem, type);
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
            kernels.pack_lhs(lhs, type, (i + task) * kLhsGroupRows,
                             left.data() + task * group_bytes, sizes.lhs_panel, &left_ranges[task]);
          } else {
            task -= new_groups;
            right_ranges[task] = ScaleRange();
            kernels.pack_rhs(rhs, type, (j + task) * kTileColumns,
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

// Rows up to which rhs is packed slice by slice beside its use, and codes are multiplied as they
// are.
constexpr int64_t kThinRows = 60;
constexpr int64_t kThinnestRows = 12;

constexpr int64_t kThinPanels = 4;

constexpr int64_t kThinSlice = 16;  // chunks
constexpr int64_t kThinBytes = kThinPanels * kTileColumns * (kThinSlice * kChunk + 64);

// A slice of a few panels' codes, moved close together: rows far apart evict each other from a
// first-level cache, and no prefetcher of the hardware follows them.
inline Source Gathered(const Source& rhs, int64_t first_row, int64_t chunk, int64_t count,
                       char* to) {
  Source slice = SliceOf(rhs, chunk, count);
  slice.rows = std::min(kThinPanels * kTileColumns, rhs.rows - first_row);
  const char* from = static_cast<const char*>(slice.elements) + first_row * rhs.row_stride;
  if (rhs.scales != nullptr) slice.scales += first_row * rhs.scale_row_stride;
  const bool rows_first = rhs.k_stride == 1;
  const int64_t lines = rows_first ? slice.rows : slice.k;
  const int64_t length = rows_first ? slice.k : slice.rows;
  const int64_t step = rows_first ? rhs.row_stride : rhs.k_stride;
  const int64_t packed = rows_first ? kThinSlice * kChunk + 64 : kThinPanels * kTileColumns;
  for (int64_t line = 0; line < lines; ++line) {
#if defined(__GNUC__) || defined(__clang__)
    if (line + 8 < lines) {
      const char* ahead = from + (line + 8) * step;
      for (int64_t at = 0; at < length; at += 64) __builtin_prefetch(ahead + at, 0, 3);
    }
#endif
    std::memcpy(to + line * packed, from + line * step, static_cast<size_t>(length));
  }
  slice.elements = to;
  (rows_first ? slice.row_stride : slice.k_stride) = packed;
  return slice;
}

// A few rhs panels times all of a few rows.
inline void RunThinPanels(const MatmulKernels& kernels, const MatmulProblem& problem,
                          const Sizes& sizes, const Source& rhs, const char* lhs,
                          const ScaleRange* lhs_ranges, int64_t first_panel, int64_t product) {
  constexpr int64_t kLhsPanels = kThinRows / kTileRows;
  alignas(64) float tiles[kThinPanels][kLhsPanels][kTileRows * kTileColumns];
  alignas(64) char packed[24 << 10];
  const int64_t m = problem.lhs.rows, n = problem.rhs.rows;
  const int64_t num_panels = std::min(kThinPanels, sizes.rhs_panels - first_panel);
  const int64_t first_column = first_panel * kTileColumns;
  const bool is_codes = rhs.element <= kElementInt8;
  const bool codes = (sizes.type == kFloat32 || sizes.type == kInt8) && is_codes &&
                     kernels.multiply_codes != nullptr && m <= kThinnestRows;
  const bool gather = is_codes && rhs.layout == kStrided;
  // Packed codes need no slices: each panel is one stream.
  const int64_t step = !codes   ? sizes.slice
                       : gather ? kThinSlice
                                : std::max<int64_t>(sizes.chunks, 1);
  Scratch gathered(gather ? kThinBytes : 1);
  for (int64_t chunk = 0; chunk == 0 || chunk < sizes.chunks; chunk += step) {
    const int64_t count = std::min(step, sizes.chunks - chunk);
    const Source slice = gather ? Gathered(rhs, first_column, chunk, count, gathered.data())
                                : SliceOf(rhs, chunk, count);
    for (int64_t j = 0; j < num_panels; ++j) {
      const int64_t row = (gather ? 0 : first_column) + j * kTileColumns;
      ScaleRange range;
      if (!codes) kernels.pack_rhs(slice, sizes.type, row, packed, &range);
      for (int64_t i = 0; i * kTileRows < m; ++i) {
        const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows));
        const char* left = lhs + i * sizes.lhs_panel + chunk * sizes.lhs_chunk;
        const ScaleRange& left_range = lhs_ranges[i / kLhsPanelsPerGroup];
        if (codes) {
          kernels.multiply_codes(sizes.type, rows, slice, row, count, left, left_range, tiles[j][i],
                                 chunk == 0);
        } else {
          const Scaling scaling = ChooseScaling(problem.lhs, rhs, left_range, range);
          kernels.multiply(sizes.type, rows, rhs.block, scaling, count, left, packed, tiles[j][i],
                           chunk == 0);
        }
      }
    }
  }
  const int64_t out_size = problem.out_type == kOutFloat32 ? 4 : 2;
  char* out = static_cast<char*>(problem.out) + product * m * n * out_size;
  for (int64_t j = 0; j < num_panels; ++j) {
    const int64_t column = (first_panel + j) * kTileColumns;
    for (int64_t i = 0; i * kTileRows < m; ++i) {
      kernels.store(tiles[j][i], static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows)),
                    static_cast<int>(std::min<int64_t>(kTileColumns, n - column)),
                    problem.alpha[product * problem.alpha_step], problem.out_type,
                    out + (i * kTileRows * n + column) * out_size, n);
    }
  }
}

template <class Pool>
void RunThin(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem) {
  const PanelType type = ChoosePanels(kernels, problem.lhs.element, problem.rhs.element);
  const Sizes sizes = SizesOf(problem, type);
  const int64_t group_bytes = sizes.lhs_panel * kLhsPanelsPerGroup;
  Scratch left(sizes.lhs_groups * group_bytes + 64);
  ScaleRange ranges[(kThinRows + kLhsGroupRows - 1) / kLhsGroupRows];
  const int64_t num_products = static_cast<int64_t>(problem.products.size());
  for (int64_t product = 0; product < num_products; ++product) {
    const Source lhs = MatrixOf(problem.lhs, problem.products[product].lhs);
    const Source rhs = MatrixOf(problem.rhs, problem.products[product].rhs);
    NoPool nobody;
    ParallelFor(nobody, sizes.lhs_groups, [&](int64_t group) {
      ranges[group] = ScaleRange();
      kernels.pack_lhs(lhs, type, group * kLhsGroupRows, left.data() + group * group_bytes,
                       sizes.lhs_panel, &ranges[group]);
    });
    ParallelFor(pool, (sizes.rhs_panels + kThinPanels - 1) / kThinPanels, [&](int64_t task) {
      RunThinPanels(kernels, problem, sizes, rhs, left.data(), ranges, task * kThinPanels, product);
    });
  }
}

// Products that share rhs are one product of more rows, where the rows follow each other.
inline void MergeRows(MatmulProblem* problem) {
  const int64_t batch = static_cast<int64_t>(problem->products.size());
  if (batch < 2 || problem->lhs.k_stride != 1 || problem->alpha_step != 0) return;
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

#endif  // MX_JAX_CUSTOM_CALLS_CPU_MATMUL_RUN_H_
