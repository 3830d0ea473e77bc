// A few panels of rhs by all of few rows, in each of the ways there are: as codes, unpacked, or
// unpacked while the first rows are multiplied.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_PANELS_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_PANELS_H_

#include <algorithm>
#include <cstdint>

#include "common/macros.h"
#include "products/problem.h"
#include "products/weights.h"

namespace mx {

// Rows up to which rhs is decoded slice by slice beside its use; with codes decoded on their way,
// once for every few rows.
constexpr int64_t kThinRows = 60;
// Up to here where decoding takes many instructions: codes of 8 bits to bf16, not packed.
constexpr int64_t kCostlyRows = 24;
// Up to here packed codes whose decoded words kernels could keep: the second panel of rows would not
// be full.
constexpr int64_t kAnewRows = 11;

constexpr int64_t kThinPanels = 4;

// All that the tasks of one product share.
struct ThinProduct {
  const MatmulKernels& kernels;
  const MatmulProblem& problem;
  const Sizes& sizes;
  Source rhs;
  const char* lhs;
  const char* folded;  // lhs times kFoldLhs, or null
  ScaleRange lhs_range;
  int64_t product;

  const PanelKernels& panels() const { return *kernels.panels[sizes.type]; }

  // Whether rhs is decoded for the first few rows and kept for the others, where its scales allow it.
  bool as_kept() const {
    return rhs.layout != kStrided && problem.lhs.rows > kAnewRows &&
           panels().multiply_keeping != nullptr;
  }

  // Or as codes, decoded anew for every few rows.
  bool as_codes() const {
    const bool costly = sizes.type == kBf16 && (rhs.element <= kE5M2 || rhs.element == kElementInt8);
    return rhs.element <= kElementInt8 && panels().multiply_codes != nullptr && !as_kept() &&
           problem.lhs.rows <= (costly ? kCostlyRows : kThinRows);
  }
};

// A few neighbouring rhs panels, and their tiles.
struct ThinPanels {
  static constexpr int64_t kLhsPanels = kThinRows / kTileRows;
  static constexpr int64_t kTile = kTileRows * kTileColumns;

  int64_t first, count;
  alignas(64) float tiles[kThinPanels][kLhsPanels][kTile];
  alignas(64) char unpacked[24 << 10];
};

// What `count` panels of codes, which lie as `like` says, are multiplied as; without rows.
inline CodesProduct CodesOf(const ThinProduct& task, const Source& like, int64_t num_chunks,
                            const char* codes, const uint8_t* scales, int64_t count) {
  const char* summaries = codes + like.panel_bytes - sizeof(PanelSummary);
  CodesProduct p{};
  p.element = like.element;
  p.scale_kind = like.scale_kind;
  p.block = like.block;
  p.num_chunks = num_chunks;
  p.codes = codes;
  p.scales = scales;
  p.panel_bytes = like.panel_bytes;
  p.panels = static_cast<int>(count);
  p.summaries = reinterpret_cast<const PanelSummary*>(summaries);
  p.lhs_stride = task.sizes.lhs_panel;
  p.tile_stride = ThinPanels::kLhsPanels * ThinPanels::kTile;
  return p;
}

// `count` panels of codes, which lie as `like` says, by all rows.
inline void MultiplyThinCodes(const ThinProduct& task, const Source& like, int64_t num_chunks,
                              const char* codes, const uint8_t* scales, int64_t count,
                              uint8_t highest_scale, int64_t chunk, float* tiles) {
  CodesProduct p = CodesOf(task, like, num_chunks, codes, scales, count);
  p.folded = task.folded != nullptr && highest_scale <= kMostFoldedScale;
  p.clear = chunk == 0;
  const int64_t m = task.problem.lhs.rows;
  for (int64_t row = 0; row < m; row += kMostRows) {
    p.rows = static_cast<int>(std::min<int64_t>(kMostRows, m - row));
    p.lhs = (p.folded ? task.folded : task.lhs) + row / kTileRows * task.sizes.lhs_panel +
            chunk * task.sizes.lhs_chunk;
    p.tiles = tiles + row * kTileColumns;
    task.panels().multiply_codes(p);
  }
}

// `count` chunks of one panel, from `chunk` on.
struct ThinSlice {
  int64_t panel, chunk, count;
};

// Fetches a share of what follows a slice: of the panel's next one, or the first of the next panel.
// `rhs` begins where the slice does.
MX_INLINE void PrefetchBehind(const ThinProduct& task, const Source& rhs, const ThinSlice& slice,
                              int64_t first_panel, int64_t share, int64_t shares) {
  const int64_t code_bytes = PanelChunkBytes(rhs.layout);
  const int64_t scale_bytes = kChunk / rhs.block * kTileColumns;
  int64_t codes = slice.count * code_bytes, scales = slice.count * scale_bytes;
  int64_t at = (first_panel + slice.panel) * rhs.panel_bytes;
  if (slice.chunk + slice.count >= task.sizes.chunks) {
    at += rhs.panel_bytes;
    codes = -slice.chunk * code_bytes, scales = -slice.chunk * scale_bytes;
  }
  PrefetchShare(static_cast<const char*>(rhs.elements) + at + codes, slice.count * code_bytes,
                share, shares);
  PrefetchShare(reinterpret_cast<const char*>(rhs.scales) + at + scales,
                slice.count * scale_bytes, share, shares);
}

// Rows from the lhs panel `first` on by a slice of one panel, unpacked from `rhs`. What follows, if
// it was packed ahead of time, is fetched meanwhile.
inline void MultiplyThinRows(const ThinProduct& task, const Source& rhs, int64_t first,
                             Scaling scaling, const ThinSlice& slice, ThinPanels* panels) {
  const int64_t shares = (task.problem.lhs.rows + kTileRows - 1) / kTileRows - first;
  const int64_t m = task.problem.lhs.rows;
  for (int64_t i = first; i * kTileRows < m; ++i) {
    if (rhs.layout != kStrided) PrefetchBehind(task, rhs, slice, panels->first, i - first, shares);
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows));
    const char* left = task.lhs + i * task.sizes.lhs_panel + slice.chunk * task.sizes.lhs_chunk;
    task.panels().multiply(rows, rhs.block, scaling, slice.count, left, panels->unpacked,
                           panels->tiles[slice.panel][i], slice.chunk == 0);
  }
}

// `count` chunks of one panel, unpacked, by all rows.
inline void MultiplyThinUnpacked(const ThinProduct& task, const Source& rhs, int64_t row,
                                 int64_t chunk, int64_t count, ThinPanels* panels, int64_t panel) {
  ScaleRange range;
  task.panels().pack_rhs(rhs, row, panels->unpacked, &range);
  const Scaling scaling = ChooseScaling(task.problem.lhs, rhs, task.lhs_range, range);
  MultiplyThinRows(task, rhs, 0, scaling, {panel, chunk, count}, panels);
}

// Slices of a panel through the unpacked form, whatever its codes and scales are.
inline void RunThinUnpacked(const ThinProduct& task, ThinPanels* panels, int64_t panel) {
  const int64_t row = (panels->first + panel) * kTileColumns;
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += task.sizes.slice) {
    const int64_t count = std::min(task.sizes.slice, task.sizes.chunks - chunk);
    MultiplyThinUnpacked(task, SliceOf(task.rhs, chunk, count), row, chunk, count, panels, panel);
  }
}

// Slices of a panel that was packed ahead of time: decoded as the first rows are multiplied, which
// leaves the multipliers busy, and kept for the others.
inline void RunThinKept(const ThinProduct& task, ThinPanels* panels, int64_t panel) {
  const Source& rhs = task.rhs;
  const int64_t at = (panels->first + panel) * rhs.panel_bytes;
  const Scaling scaling = rhs.scale_kind == kScaleE4M3 ? kProduct : kNormal;
  CodesProduct p = CodesOf(task, rhs, task.sizes.chunks,
                           static_cast<const char*>(rhs.elements) + at, rhs.scales + at, 1);
  p.rows = kTileRows;
  p.tiles = panels->tiles[panel][0];
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += task.sizes.slice) {
    p.num_chunks = std::min(task.sizes.slice, task.sizes.chunks - chunk);
    const Source slice = SliceOf(rhs, chunk, p.num_chunks);
    p.codes = static_cast<const char*>(slice.elements) + at;
    p.scales = slice.scales + at;
    p.lhs = task.lhs + chunk * task.sizes.lhs_chunk;
    p.clear = chunk == 0;
    task.panels().multiply_keeping(p, panels->unpacked);
    MultiplyThinRows(task, slice, 1, scaling, {panel, chunk, p.num_chunks}, panels);
  }
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_PANELS_H_
