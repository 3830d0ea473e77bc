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
#include "products/thin_panels.h"
#include "products/weights.h"

namespace mx {

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
    if (task.as_kept()) {
      for (; count > 0; --count) RunThinKept(task, panels, panel++);
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
  if (task.rhs.layout != kStrided && (task.as_codes() || task.as_kept())) {
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
