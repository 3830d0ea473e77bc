// A batch of products, and how its operands are cut.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PROBLEM_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PROBLEM_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/tiny.h"
#include "products/kernels.h"

namespace mx {

// Which matrix of each operand.
struct Product {
  int64_t lhs, rhs;
};

struct MatmulProblem {
  Source lhs, rhs;  // the first matrix of each; others follow without gaps
  std::vector<Product> products;
  std::vector<Factors> factors;  // of each product, or one of all
  FloatType out_type;
  void* out;  // [products, lhs.rows, rhs.rows]
};

// Sums of some rows and columns of a product, which the tile no longer holds then, to its output.
// A row alone may have more columns than a tile.
inline void StoreTile(const MatmulKernels& kernels, const MatmulProblem& problem, int64_t product,
                      float* tile, int rows, int columns, void* out) {
  const Factors factors = problem.factors[problem.factors.size() == 1 ? 0 : product];
  if (MX_UNLIKELY(factors.first != 1.0f)) {
    const int count = rows == 1 ? columns : rows * kTileColumns;
    for (int i = 0; i < count; ++i) tile[i] *= factors.first;
  }
  kernels.store(tile, rows, columns, factors.last, problem.out_type, out, problem.rhs.rows);
}

inline bool FitsBf16(Element element) {
  return element != kElementFloat32 && element != kElementF16;
}

// The fastest type of panel that holds both operands exactly.
inline PanelType ChoosePanels(const MatmulKernels& kernels, Element lhs, Element rhs) {
  const bool largest = lhs == kElementInt8 && rhs == kElementInt8;
  if (kernels.panels[kInt8] && FitsInt8(lhs) && FitsInt8(rhs) &&
      !(largest && kernels.panels[kInt8]->adds_pairs)) {
    return kInt8;
  }
  if (kernels.panels[kBf16] && FitsBf16(lhs) && FitsBf16(rhs)) return kBf16;
  if (kernels.panels[kInt16] && FitsInt16(lhs) && FitsInt16(rhs)) return kInt16;
  return kFloat32;
}

inline Scaling ChooseScaling(const Source& lhs, const Source& rhs, const ScaleRange& left,
                             const ScaleRange& right) {
  if (lhs.scale_kind == kScaleE4M3 || rhs.scale_kind == kScaleE4M3) {
    // Of two scales, one of which is 1, the exponents may be added, whatever the other is.
    return lhs.scale_kind == kNoScale || rhs.scale_kind == kNoScale ? kNormal : kProduct;
  }
  // Room for the elements' factors, at most 2^-12, and for the blocks' sums.
  const int low = std::min(left.low, 0) + std::min(right.low, 0);
  const int high = std::max(left.high, 0) + std::max(right.high, 0);
  const bool each = left.low >= -110 && right.low >= -110 && left.high < 128 && right.high < 128;
  return each && low >= -110 && high <= 120 ? kNormal : kWide;
}

// Fetches part `share` of `shares` of some bytes to the second level of the cache. What comes next is
// fetched while panels are multiplied, a little before each: at once, it would fill all the buffers
// that misses wait in, and hardware prefetchers, which stop at pages and where a slice ends, leave
// most of it to be waited for. Bytes beyond an operand do no harm. Always inlined: of a function that
// only fetches, GCC drops the calls as without effect.
MX_INLINE void PrefetchShare(const char* from, int64_t bytes, int64_t share, int64_t shares) {
#if defined(__GNUC__) || defined(__clang__)
  const int64_t last = bytes * (share + 1) / shares;
  for (int64_t at = bytes * share / shares / 64 * 64; at < last; at += 64) {
    __builtin_prefetch(from + at, 0, 2);
  }
#else
  (void)from, (void)bytes, (void)share, (void)shares;
#endif
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

inline Source MatrixOf(const Source& source, int64_t index) {
  Source moved = source;
  if (source.layout != kStrided) {
    const int64_t panels = (source.rows + kTileColumns - 1) / kTileColumns;
    moved.elements =
        static_cast<const char*>(source.elements) + index * panels * source.panel_bytes;
    return moved;
  }
  const int64_t bytes = source.rows * source.k * ElementBytes(source.element);
  moved.elements = static_cast<const char*>(source.elements) + index * bytes;
  const int64_t blocks = (source.k + source.block - 1) / source.block;
  if (source.scales != nullptr) moved.scales = source.scales + index * source.rows * blocks;
  return moved;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PROBLEM_H_
