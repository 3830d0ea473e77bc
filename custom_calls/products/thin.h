// Products of few rows: all of lhs is packed once, and rhs is read once, a few panels at a time.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "common/thread_pool.h"
#include "products/fold.h"
#include "products/problem.h"
#include "products/row.h"
#include "products/scratch.h"
#include "products/weights.h"

namespace mx {

// Rows up to which rhs is decoded slice by slice beside its use; with codes decoded on their way,
// once for every few rows.
constexpr int64_t kThinRows = 60;
// Up to here where decoding takes many instructions: codes of 8 bits to bf16.
constexpr int64_t kCostlyRows = 24;
// Up to here where both decoding and multiplying take few: packed codes to int8.
constexpr int64_t kIntegerRows = 16;

constexpr int64_t kThinPanels = 4;

constexpr int64_t kThinSlice = 16;  // chunks
constexpr int64_t kThinBytes = kThinPanels * kTileColumns * (kThinSlice * kChunk + 64);
constexpr int64_t kThinPanelBytes = 24 << 10;  // more than a panel of a slice has

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

  // Whether rhs is multiplied as codes, where its scales allow it.
  bool as_codes() const {
    const bool costly = sizes.type == kBf16 && (rhs.element <= kE5M2 || rhs.element == kElementInt8);
    const bool integers = sizes.type == kInt8 && rhs.layout != kStrided;
    return rhs.element <= kElementInt8 && panels().multiply_codes != nullptr &&
           problem.lhs.rows <= (costly ? kCostlyRows : integers ? kIntegerRows : kThinRows);
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

// `count` panels of codes, which lie as `like` says, by all rows.
inline void MultiplyThinCodes(const ThinProduct& task, const Source& like, int64_t num_chunks,
                              const char* codes, const uint8_t* scales, int64_t count,
                              uint8_t highest_scale, int64_t chunk, float* tiles) {
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
  p.folded = task.folded != nullptr && highest_scale <= kMostFoldedScale;
  p.lhs_stride = task.sizes.lhs_panel;
  p.tile_stride = ThinPanels::kLhsPanels * ThinPanels::kTile;
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

// `count` chunks of one panel, unpacked, by all rows.
inline void MultiplyThinUnpacked(const ThinProduct& task, const Source& rhs, int64_t row,
                                 int64_t chunk, int64_t count, ThinPanels* panels, int64_t panel) {
  const int64_t m = task.problem.lhs.rows;
  ScaleRange range;
  task.panels().pack_rhs(rhs, row, panels->unpacked, &range);
  const Scaling scaling = ChooseScaling(task.problem.lhs, rhs, task.lhs_range, range);
  for (int64_t i = 0; i * kTileRows < m; ++i) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows));
    const char* left = task.lhs + i * task.sizes.lhs_panel + chunk * task.sizes.lhs_chunk;
    task.panels().multiply(rows, rhs.block, scaling, count, left, panels->unpacked,
                           panels->tiles[panel][i], chunk == 0);
  }
}

// Slices of a panel through the unpacked form, whatever its codes and scales are.
inline void RunThinUnpacked(const ThinProduct& task, ThinPanels* panels, int64_t panel) {
  const int64_t row = (panels->first + panel) * kTileColumns;
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += task.sizes.slice) {
    const int64_t count = std::min(task.sizes.slice, task.sizes.chunks - chunk);
    MultiplyThinUnpacked(task, SliceOf(task.rhs, chunk, count), row, chunk, count, panels, panel);
  }
}

// Weights that were packed ahead of time: neighbours together while they are tame.
inline void RunThinPacked(const ThinProduct& task, ThinPanels* panels) {
  const Source& rhs = task.rhs;
#if defined(__GNUC__) || defined(__clang__)
  // The summaries that the next task begins with lie far apart.
  const char* next = reinterpret_cast<const char*>(rhs.summary) +
                     (panels->first + kThinPanels) * rhs.panel_bytes;
  for (int64_t j = 0; j < kThinPanels; ++j) __builtin_prefetch(next + j * rhs.panel_bytes, 0, 3);
#endif
  for (int64_t panel = 0; panel < panels->count;) {
    int64_t count = 0;
    uint8_t highest = 0;
    const int64_t at = (panels->first + panel) * rhs.panel_bytes;
    for (; panel + count < panels->count; ++count) {
      const PanelSummary& summary = *reinterpret_cast<const PanelSummary*>(
          reinterpret_cast<const char*>(rhs.summary) + at + count * rhs.panel_bytes);
      if (!IsTame(summary, rhs.scale_kind, task.lhs_range)) break;
      highest = std::max(highest, summary.high);
    }
    if (count == 0) {
      RunThinUnpacked(task, panels, panel++);
      continue;
    }
    MultiplyThinCodes(task, rhs, task.sizes.chunks, static_cast<const char*>(rhs.elements) + at,
                      rhs.scales + at, count, highest, 0, panels->tiles[panel][0]);
    panel += count;
  }
}

// Codes as they came: gathered, and packed, slice by slice.
inline void RunThinStrided(const ThinProduct& task, ThinPanels* panels) {
  const Source& rhs = task.rhs;
  Scratch gathered(kThinBytes), packed(2 * kThinPanelBytes);
  const bool codes = task.as_codes();
  const int64_t step = codes ? kThinSlice : task.sizes.slice;
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += step) {
    const int64_t count = std::min(step, task.sizes.chunks - chunk);
    const Source slice =
        Gathered(rhs, panels->first * kTileColumns, chunk, count, gathered.data());
    for (int64_t panel = 0; panel < panels->count; panel += 2) {
      const int64_t pair = codes ? std::min<int64_t>(2, panels->count - panel) : 0;
      bool tame = codes;
      uint8_t highest = 0;
      Source like = slice;
      like.panel_bytes = SizesOfWeights(rhs.element, rhs.block, kTileColumns, slice.k).panel_bytes;
      for (int64_t j = 0; j < pair; ++j) {
        uint8_t* to = reinterpret_cast<uint8_t*>(packed.data()) + j * like.panel_bytes;
        task.kernels.pack_codes(slice, (panel + j) * kTileColumns, to);
        const PanelSummary* summary = reinterpret_cast<const PanelSummary*>(to + like.panel_bytes);
        tame = tame && IsTame(summary[-1], rhs.scale_kind, task.lhs_range);
        highest = std::max(highest, summary[-1].high);
      }
      if (tame) {
        const int64_t code_bytes =
            SizesOfWeights(rhs.element, rhs.block, kTileColumns, slice.k).code_bytes;
        MultiplyThinCodes(task, like, count, packed.data(),
                          reinterpret_cast<uint8_t*>(packed.data()) + code_bytes, pair, highest,
                          chunk,
                          panels->tiles[panel][0]);
        continue;
      }
      for (int64_t j = panel; j < std::min(panel + 2, panels->count); ++j) {
        for (int64_t part = 0; part == 0 || part < count; part += task.sizes.slice) {
          const int64_t some = std::min(task.sizes.slice, count - part);
          MultiplyThinUnpacked(task, SliceOf(slice, part, some), j * kTileColumns, chunk + part,
                               some, panels, j);
        }
      }
    }
  }
}

inline void StoreThin(const ThinProduct& task, ThinPanels* panels) {
  const MatmulProblem& problem = task.problem;
  const int64_t m = problem.lhs.rows, n = problem.rhs.rows;
  const int64_t out_size = problem.out_type == kOutFloat32 ? 4 : 2;
  char* out = static_cast<char*>(problem.out) + task.product * m * n * out_size;
  for (int64_t j = 0; j < panels->count; ++j) {
    const int64_t column = (panels->first + j) * kTileColumns;
    for (int64_t i = 0; i * kTileRows < m; ++i) {
      StoreTile(task.kernels, problem, task.product, panels->tiles[j][i],
                static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows)),
                static_cast<int>(std::min<int64_t>(kTileColumns, n - column)),
                out + (i * kTileRows * n + column) * out_size);
    }
  }
}

// A few rhs panels times all of a few rows.
inline void RunThinPanels(const ThinProduct& task, int64_t first_panel) {
  ThinPanels panels;
  panels.first = first_panel;
  panels.count = std::min(kThinPanels, task.sizes.rhs_panels - first_panel);
  if (task.rhs.layout != kStrided && task.as_codes()) {
    RunThinPacked(task, &panels);
  } else if (task.rhs.layout == kStrided && task.rhs.element <= kElementInt8) {
    RunThinStrided(task, &panels);
  } else {
    for (int64_t panel = 0; panel < panels.count; ++panel) RunThinUnpacked(task, &panels, panel);
  }
  StoreThin(task, &panels);
}

// Whether rhs is multiplied faster by a folded lhs: MatmulKernels::multiply_codes.
inline bool WantsFold(const ThinProduct& thin) {
  return thin.sizes.type == kFloat32 && thin.rhs.element <= kE5M2 &&
         thin.rhs.scale_kind == kScaleE8M0 && thin.as_codes();
}

template <class Pool>
void RunThin(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem) {
  const PanelType type = ChoosePanels(kernels, problem.lhs.element, problem.rhs.element);
  if (IsRowProduct(kernels, problem, type) && RunRow(pool, kernels, problem, type)) return;
  const Sizes sizes = SizesOf(problem, type);
  const int64_t group_bytes = sizes.lhs_panel * kLhsPanelsPerGroup;
  Scratch left(sizes.lhs_groups * group_bytes + 64);
  std::unique_ptr<Scratch> folded;
  const int64_t num_products = static_cast<int64_t>(problem.products.size());
  for (int64_t product = 0; product < num_products; ++product) {
    const Source lhs = MatrixOf(problem.lhs, problem.products[product].lhs);
    const Source rhs = MatrixOf(problem.rhs, problem.products[product].rhs);
    ScaleRange range;
    NoPool nobody;
    ParallelFor(nobody, sizes.lhs_groups, [&](int64_t group) {
      kernels.panels[type]->pack_lhs(lhs, group * kLhsGroupRows, left.data() + group * group_bytes,
                                     sizes.lhs_panel, &range);
    });
    ThinProduct thin = {kernels, problem, sizes, rhs, left.data(), nullptr, range, product};
    if (WantsFold(thin)) {
      if (folded == nullptr) folded.reset(new Scratch(sizes.lhs_groups * group_bytes + 64));
      if (FoldLhs(problem.lhs, sizes, left.data(), folded->data())) thin.folded = folded->data();
    }
    ParallelFor(pool, (sizes.rhs_panels + kThinPanels - 1) / kThinPanels,
                [&](int64_t task) { RunThinPanels(thin, task * kThinPanels); });
  }
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_
