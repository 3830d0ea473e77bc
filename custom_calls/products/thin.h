// Products of few rows: all of lhs is packed once, and rhs is read once, panel by panel, in one of the
// ways there are: as codes, unpacked, or unpacked while the first rows are multiplied.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "common/float_environment.h"
#include "common/thread_pool.h"
#include "products/problem.h"
#include "products/scratch.h"
#include "products/weights.h"

namespace mx {

// Up to here where decoding takes many instructions: codes of 8 bits to bf16, not packed.
constexpr int64_t kCostlyRows = 24;
// Up to here packed codes whose decoded words kernels could keep: the second panel of rows would not
// be full.
constexpr int64_t kAnewRows = 11;

constexpr int64_t kThinPanels = 4;  // of one task, at most
constexpr int64_t kThinSlice = 16;  // chunks of codes as they came, packed at a time
constexpr int64_t kThinBytes = kThinPanels * kTileColumns * (kThinSlice * kChunk + 64);
constexpr int64_t kThinPanelBytes = 24 << 10;  // more than a panel of a slice has

// Whether a float of this magnitude, as bits, is 0, or between 2^-34 and 2^40.
inline bool IsFoldable(uint32_t magnitude) {
  const uint32_t lowest = (127 - 34) << 23, highest = (127 + 40) << 23;
  return (magnitude == 0) | (magnitude - lowest <= highest - lowest);
}

// Copies a panel of float32 lhs of `rows` rows to `out`, times kFoldLhs. False where that might
// change a bit or come near a subnormal.
inline bool FoldLhs(int32_t block, int64_t num_chunks, int rows, const char* lhs, char* out) {
  const float* from = reinterpret_cast<const float*>(lhs);
  float* to = reinterpret_cast<float*>(out);
  const int64_t num_scales = kChunk / block * rows, count = kChunk * rows;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    std::memcpy(to, from, static_cast<size_t>(num_scales) * sizeof(float));
    from += num_scales, to += num_scales;
    int outside = 0;
    for (int64_t i = 0; i < count; ++i) {
      uint32_t magnitude;
      std::memcpy(&magnitude, from + i, sizeof magnitude);
      outside |= !IsFoldable(magnitude & 0x7fffffff);
    }
    if (outside) return false;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i] * kFoldLhs;
    from += count, to += count;
  }
  return true;
}

// One product, and its lhs in the panels that its way wants.
class ThinProduct {
 public:
  ThinProduct(const MatmulKernels& kernels, const MatmulProblem& problem, const Sizes& sizes,
              int64_t product)
      : kernels(kernels),
        problem(problem),
        sizes(sizes),
        lhs(MatrixOf(problem.lhs, problem.products[product].lhs)),
        rhs(MatrixOf(problem.rhs, problem.products[product].rhs)),
        product(product),
        tile_bytes_(sizes.lhs_groups * sizes.lhs_panel * kLhsPanelsPerGroup + 64),
        few_bytes_(as_codes() ? FewBytesOf(lhs.rows) : 0),
        memory_(tile_bytes_ + few_bytes_ * (MayFold() ? 2 : 1)) {
    if (as_codes()) PackFew();
    else PackTiles(&lhs_range);
  }

  const MatmulKernels& kernels;
  const MatmulProblem& problem;
  const Sizes& sizes;
  const Source lhs, rhs;
  const int64_t product;
  ScaleRange lhs_range;

  const PanelKernels& panels() const { return *kernels.panels[sizes.type]; }
  bool is_packed() const { return rhs.layout != kStrided; }

  // Whether rhs is decoded for the first few rows and kept for the others, where its scales allow it.
  bool as_kept() const {
    return is_packed() && lhs.rows > kAnewRows && panels().multiply_keeping != nullptr;
  }

  // Or as codes, decoded anew for every few rows.
  bool as_codes() const {
    const bool costly = sizes.type == kBf16 && (rhs.element <= kE5M2 || rhs.element == kElementInt8);
    return rhs.element <= kElementInt8 && panels().multiply_codes != nullptr && !as_kept() &&
           (is_packed() || panels().packs_strided) &&
           lhs.rows <= (costly ? kCostlyRows : panels().most_anew);
  }

  // `count` chunks of a panel of codes by all rows, from `chunk` of lhs on.
  void MultiplyCodes(const uint8_t* records, const PanelSummary& summary, int64_t chunk,
                     int64_t count, float* tile) const {
    CodesProduct p{};
    p.element = rhs.element;
    p.scale_kind = rhs.scale_kind;
    p.block = rhs.block;
    p.num_chunks = count;
    p.records = reinterpret_cast<const char*>(records);
    p.summary = &summary;
    p.folded = folds_ && summary.high <= kMostFoldedScale;
    p.clear = chunk == 0;
    const char* left = memory_.data() + tile_bytes_ + (p.folded ? few_bytes_ : 0);
    for (int64_t row = 0; row < lhs.rows; row += p.rows) {
      p.rows = Few(lhs.rows - row);
      p.lhs = left + chunk * ChunkBytes(sizes.type, rhs.block, p.rows, true);
      p.tile = tile + row * kTileColumns;
      panels().multiply_codes(p);
      left += PanelBytes(p.rows);
    }
  }

  // Rows in panels of kTileRows, from a chunk on. Beside codes they are packed when first wanted.
  const char* Tiles(int64_t panel, int64_t chunk) const {
    if (as_codes()) {
      std::call_once(once_, [this] {
        ScaleRange range;
        PackTiles(&range);
      });
    }
    return memory_.data() + panel * sizes.lhs_panel + chunk * sizes.lhs_chunk;
  }

 private:
  int Few(int64_t left) const { return FewRows(left, panels().most_few); }
  int64_t PanelBytes(int rows) const {
    return (sizes.chunks * ChunkBytes(sizes.type, rhs.block, rows, true) + 64 + 63) / 64 * 64;
  }
  int64_t FewBytesOf(int64_t rows) const {
    int64_t bytes = 0;
    for (; rows > 0; rows -= Few(rows)) bytes += PanelBytes(Few(rows));
    return bytes;
  }

  // Whether rhs may be multiplied faster by a folded lhs: see FoldLhs.
  bool MayFold() const {
    return rhs.element < panels().folded && rhs.scale_kind == kScaleE8M0;
  }

  void PackFew() {
    KeepSubnormals environment;
    char* to = memory_.data() + tile_bytes_;
    folds_ = MayFold();
    int rows;
    for (int64_t row = 0; row < lhs.rows; row += rows) {
      rows = Few(lhs.rows - row);
      panels().pack_few(lhs, row, rows, to, &lhs_range);
      folds_ = folds_ && FoldLhs(rhs.block, sizes.chunks, rows, to, to + few_bytes_);
      to += PanelBytes(rows);
    }
  }

  void PackTiles(ScaleRange* range) const {
    KeepSubnormals environment;
    for (int64_t group = 0; group < sizes.lhs_groups; ++group) {
      char* to = memory_.data() + group * kLhsPanelsPerGroup * sizes.lhs_panel;
      panels().pack_lhs(lhs, group * kLhsGroupRows, to, sizes.lhs_panel, range);
    }
  }

  const int64_t tile_bytes_, few_bytes_;
  Scratch memory_;
  bool folds_ = false;
  mutable std::once_flag once_;
};

// A few neighbouring rhs panels, and their tiles.
struct ThinPanels {
  int64_t first, count;
  alignas(64) float tiles[kThinPanels][kThinRows * kTileColumns];
  alignas(64) char unpacked[24 << 10];
};

// `count` chunks of one panel, from `chunk` on.
struct ThinSlice {
  int64_t panel, chunk, count;
};

// Rows from the lhs panel `first` on by a slice of one panel, unpacked from `rhs`, which begins where
// the slice does. What follows, if it was packed ahead of time, is fetched meanwhile.
inline void MultiplyThinRows(const ThinProduct& task, const Source& rhs, int64_t first,
                             Scaling scaling, const ThinSlice& slice, ThinPanels* panels) {
  const int64_t m = task.lhs.rows, shares = (m + kTileRows - 1) / kTileRows - first;
  const int64_t row = (panels->first + slice.panel) * kTileColumns;
  for (int64_t i = first; i * kTileRows < m; ++i) {
    if (task.is_packed()) {
      const int64_t bytes = slice.count / kRecordChunks * RecordBytes(rhs.layout, rhs.block);
      const char* next = reinterpret_cast<const char*>(RecordAt(rhs, row, 0)) + bytes;
      PrefetchShare(next, bytes, i - first, shares);
    }
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, m - i * kTileRows));
    task.panels().multiply({task.lhs.element, rhs.element, rows, rhs.block, scaling, slice.count,
                            task.Tiles(i, slice.chunk), panels->unpacked,
                            panels->tiles[slice.panel] + i * kTileRows * kTileColumns,
                            slice.chunk == 0});
  }
}

// Slices of a panel through the unpacked form, whatever its codes and scales are. `rhs` begins with
// chunk `chunk`, and `row` is the panel's first.
inline void RunThinUnpacked(const ThinProduct& task, const Source& rhs, int64_t row, int64_t chunk,
                            int64_t count, ThinPanels* panels, int64_t panel) {
  for (int64_t part = 0; part == 0 || part < count; part += task.sizes.slice) {
    const int64_t some = std::min(task.sizes.slice, count - part);
    const Source slice = SliceOf(rhs, part, some);
    ScaleRange range;
    task.panels().pack_rhs(slice, row, panels->unpacked, &range);
    const Scaling scaling = ChooseScaling(task.lhs, rhs, task.lhs_range, range);
    MultiplyThinRows(task, slice, 0, scaling, {panel, chunk + part, some}, panels);
  }
}

// Slices of a panel that was packed ahead of time: decoded as the first rows are multiplied, which
// leaves the multipliers busy, and kept for the others.
inline void RunThinKept(const ThinProduct& task, ThinPanels* panels, int64_t panel) {
  const Source& rhs = task.rhs;
  const Scaling scaling = rhs.scale_kind == kScaleE4M3 ? kProduct : kNormal;
  CodesProduct p{};
  p.element = rhs.element;
  p.scale_kind = rhs.scale_kind;
  p.block = rhs.block;
  p.rows = kTileRows;
  p.tile = panels->tiles[panel];
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += task.sizes.slice) {
    p.num_chunks = std::min(task.sizes.slice, task.sizes.chunks - chunk);
    const Source slice = SliceOf(rhs, chunk, p.num_chunks);
    const int64_t row = (panels->first + panel) * kTileColumns;
    p.records = reinterpret_cast<const char*>(RecordAt(slice, row, 0));
    p.lhs = task.Tiles(0, chunk);
    p.clear = chunk == 0;
    task.panels().multiply_keeping(p, panels->unpacked);
    MultiplyThinRows(task, slice, 1, scaling, {panel, chunk, p.num_chunks}, panels);
  }
}

// Weights that were packed ahead of time.
inline void RunThinPacked(const ThinProduct& task, ThinPanels* panels) {
  for (int64_t panel = 0; panel < panels->count; ++panel) {
    const int64_t row = (panels->first + panel) * kTileColumns;
    const PanelSummary& summary = SummaryOf(task.rhs, panels->first + panel);
    const bool tame = IsTame(summary, task.rhs.scale_kind, task.lhs_range);
    if (tame && task.as_kept()) {
      RunThinKept(task, panels, panel);
    } else if (tame && task.as_codes()) {
      task.MultiplyCodes(RecordAt(task.rhs, row, 0), summary, 0, task.sizes.chunks,
                         panels->tiles[panel]);
    } else {
      RunThinUnpacked(task, task.rhs, row, 0, task.sizes.chunks, panels, panel);
    }
  }
}

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
    const int64_t ahead = line + 8 < lines ? length : 0;
    for (int64_t at = 0; at < ahead; at += 64) MX_PREFETCH(from + (line + 8) * step + at);
    std::memcpy(to + line * packed, from + line * step, static_cast<size_t>(length));
  }
  slice.elements = to;
  (rows_first ? slice.row_stride : slice.k_stride) = packed;
  return slice;
}

// Codes as they came: gathered, and packed, slice by slice.
inline void RunThinStrided(const ThinProduct& task, ThinPanels* panels) {
  Scratch gathered(kThinBytes), packed(kThinPanelBytes);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(packed.data());
  const int64_t step = task.as_codes() ? kThinSlice : task.sizes.slice;
  for (int64_t chunk = 0; chunk == 0 || chunk < task.sizes.chunks; chunk += step) {
    const int64_t count = std::min(step, task.sizes.chunks - chunk);
    const Source slice =
        Gathered(task.rhs, panels->first * kTileColumns, chunk, count, gathered.data());
    for (int64_t panel = 0; panel < panels->count; ++panel) {
      if (task.as_codes()) {
        task.kernels.pack_codes(slice, panel * kTileColumns, bytes);
        const Source codes = PackedSource(slice, bytes);
        if (IsTame(SummaryOf(codes, 0), slice.scale_kind, task.lhs_range)) {
          task.MultiplyCodes(RecordAt(codes, 0, 0), SummaryOf(codes, 0), chunk, count,
                             panels->tiles[panel]);
          continue;
        }
      }
      RunThinUnpacked(task, slice, panel * kTileColumns, chunk, count, panels, panel);
    }
  }
}

// A few rhs panels times all of a few rows.
inline void RunThinPanels(const ThinProduct& task, int64_t first, int64_t count) {
  ThinPanels panels;
  panels.first = first;
  panels.count = count;
  if (task.is_packed()) {
    RunThinPacked(task, &panels);
  } else if (task.rhs.element <= kElementInt8) {
    RunThinStrided(task, &panels);
  } else {
    for (int64_t panel = 0; panel < count; ++panel) {
      RunThinUnpacked(task, task.rhs, (first + panel) * kTileColumns, 0, task.sizes.chunks, &panels,
                      panel);
    }
  }
  const MatmulProblem& problem = task.problem;
  const int64_t m = task.lhs.rows, n = task.rhs.rows;
  const int64_t out_size = SizeOf(problem.out_type);
  char* out = static_cast<char*>(problem.out) + task.product * m * n * out_size;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t column = (first + j) * kTileColumns;
    StoreTile(task.kernels, problem, task.product, panels.tiles[j], static_cast<int>(m),
              static_cast<int>(std::min<int64_t>(kTileColumns, n - column)),
              out + column * out_size);
  }
}

template <class Pool>
void RunThin(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem) {
  const PanelType type = ChoosePanels(kernels, problem.lhs.element, problem.rhs.element);
  const Sizes sizes = SizesOf(problem, type);
  // Several tasks a thread, so that none waits long for the last one.
  const int64_t panels = sizes.rhs_panels, wanted = panels / (4 * pool.num_threads());
  const int64_t step = std::min(kThinPanels, std::max<int64_t>(1, wanted));
  for (size_t product = 0; product < problem.products.size(); ++product) {
    const ThinProduct thin(kernels, problem, sizes, static_cast<int64_t>(product));
    ParallelFor(pool, (panels + step - 1) / step, [&](int64_t task) {
      RunThinPanels(thin, task * step, std::min(step, panels - task * step));
    });
  }
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_THIN_H_
