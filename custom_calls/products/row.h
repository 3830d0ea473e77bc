// The product of one row by packed weights, as in decoding: bound by the memory that it reads, so
// lhs is laid out as it comes, and panels are read one after the other.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "common/thread_pool.h"
#include "products/fold.h"
#include "products/problem.h"
#include "products/scratch.h"

namespace mx {

constexpr int64_t kRowPanels = 8;  // of one task, at most

// A row as kernels read it: words of consecutive elements, and by block a scale and, for kInt8,
// what undoes the 128 that rhs has added. Blocks and elements beyond k are zeros.
struct PackedRow {
  int64_t blocks;
  const int32_t* words;
  int32_t* folded;  // words times kFoldLhs
  float* scales;
  int32_t* corrections;
  ScaleRange range;
};

inline int64_t RowBytes(int64_t k, int64_t blocks) {
  const int64_t padded = (k + kChunk - 1) / kChunk * kChunk;
  return padded * 8 + blocks * 8 + 256;
}

// Elements of a row in a panel's type, `padded` of them.
inline void LayOutRow(const Source& row, PanelType type, int64_t padded, char* to) {
  const int64_t bytes = BytesPerElement(type);
  std::memset(to + row.k * bytes, 0, static_cast<size_t>((padded - row.k) * bytes));
  const bool as_it_is = type == kFloat32 ? row.element == kElementFloat32
                        : type == kBf16  ? row.element == kElementBf16
                                         : row.element == kElementInt8;
  if (as_it_is) {
    std::memcpy(to, row.elements, static_cast<size_t>(row.k * bytes));
    return;
  }
  const uint8_t* codes = static_cast<const uint8_t*>(row.elements);
  if (row.element == kElementBf16) {
    for (int64_t i = 0; i < row.k; ++i) {
      uint16_t half;
      std::memcpy(&half, codes + 2 * i, sizeof half);
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      std::memcpy(to + 4 * i, &bits, sizeof bits);
    }
    return;
  }
  const ElementTables& tables = TablesOf(row.element);
  if (type == kInt8) {
    for (int64_t i = 0; i < row.k; ++i) to[i] = static_cast<char>(tables.int8[codes[i]]);
  } else if (type == kBf16) {
    for (int64_t i = 0; i < row.k; ++i) std::memcpy(to + 2 * i, &tables.bf16[codes[i]], 2);
  } else {
    for (int64_t i = 0; i < row.k; ++i) std::memcpy(to + 4 * i, &tables.float32[codes[i]], 4);
  }
}

// Whether a block's elements are all zeros, by their values: its own scale does not count then.
inline bool IsZeroRowBlock(const char* elements, int64_t bytes) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (elements[i] != 0) return false;
  }
  return true;
}

inline void PackRowScales(const Source& row, PanelType type, const char* elements,
                          PackedRow* packed) {
  const float* table = ScaleTable(row.scale_kind, row.element, type);
  const int64_t given = (row.k + row.block - 1) / row.block;
  const int64_t block_bytes = row.block * BytesPerElement(type);
  int low = 256, high = -1;
  for (int64_t b = 0; b < packed->blocks; ++b) {
    packed->scales[b] = 1.0f;
    if (row.scale_kind != kNoScale && b < given) {
      uint8_t byte = row.scales[b];
      if (row.scale_kind == kScaleE8M0) {
        if (byte < 32 && IsZeroRowBlock(elements + b * block_bytes, block_bytes)) byte = 127;
        low = std::min<int>(low, byte), high = std::max<int>(high, byte);
      }
      packed->scales[b] = table[byte];
    }
    if (type != kInt8) continue;
    int32_t sum = 0;
    for (int64_t i = 0; i < row.block; ++i) {
      sum += static_cast<int8_t>(elements[b * row.block + i]);
    }
    packed->corrections[b] = -128 * sum;
  }
  if (high < 0) return;
  packed->range.low = low - 127;
  packed->range.high = high == 255 ? 1000 : high - 127;
}

inline PackedRow PackRow(const Source& row, PanelType type, char* memory) {
  const int64_t padded = (row.k + kChunk - 1) / kChunk * kChunk;
  PackedRow packed;
  packed.blocks = padded / row.block;
  packed.scales = reinterpret_cast<float*>(memory);
  packed.corrections = reinterpret_cast<int32_t*>(memory + packed.blocks * 4);
  char* words = memory + (packed.blocks * 8 + 63) / 64 * 64;
  packed.folded = reinterpret_cast<int32_t*>(words + padded * 4);
  packed.words = reinterpret_cast<const int32_t*>(words);
  LayOutRow(row, type, padded, words);
  PackRowScales(row, type, words, &packed);
  return packed;
}

// The words times kFoldLhs, if that changes no bit and comes near no subnormal: see fold.h.
inline bool FoldRow(int64_t count, PackedRow* row) {
  int outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(row->words[i]) & 0x7fffffff;
    outside |= !IsFoldable(magnitude);
  }
  if (outside) return false;
  const float* from = reinterpret_cast<const float*>(row->words);
  float* to = reinterpret_cast<float*>(row->folded);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * kFoldLhs;
  return true;
}

// Whether the kernels have a way of their own for a product of one row.
inline bool IsRowProduct(const MatmulKernels& kernels, const MatmulProblem& problem,
                         PanelType type) {
  return problem.lhs.rows == 1 && problem.rhs.layout != kStrided &&
         problem.lhs.element != kElementF16 && kernels.panels[type]->multiply_row != nullptr;
}

// The summaries of some panels from `first` on, which lie far apart.
inline void FetchSummaries(const Source& rhs, int64_t first) {
#if defined(__GNUC__) || defined(__clang__)
  const char* from = reinterpret_cast<const char*>(rhs.summary) + first * rhs.panel_bytes;
  for (int64_t i = 0; i < kRowPanels; ++i) __builtin_prefetch(from + i * rhs.panel_bytes, 0, 3);
#endif
}

// Panels [first, last) of one product; false where one has codes or scales that only the general
// way multiplies.
inline bool RunRowPanels(const MatmulKernels& kernels, const MatmulProblem& problem, PanelType type,
                         int64_t product, const Source& rhs, const PackedRow& row, bool folds,
                         int64_t first, int64_t last) {
  FetchSummaries(rhs, last);
  alignas(64) float sums[kRowPanels * kTileColumns];
  const int64_t at = first * rhs.panel_bytes;
  uint8_t highest = 0;
  for (int64_t panel = first; panel < last; ++panel) {
    const PanelSummary& summary = *reinterpret_cast<const PanelSummary*>(
        reinterpret_cast<const char*>(rhs.summary) + panel * rhs.panel_bytes);
    if (!IsTame(summary, rhs.scale_kind, row.range)) return false;
    highest = std::max(highest, summary.high);
  }
  RowProduct p{};
  p.element = rhs.element;
  p.scale_kind = rhs.scale_kind;
  p.block = rhs.block;
  p.num_chunks = (rhs.k + kChunk - 1) / kChunk;
  p.codes = static_cast<const char*>(rhs.elements) + at;
  p.scales = rhs.scales + at;
  p.panel_bytes = rhs.panel_bytes;
  p.panels = static_cast<int>(last - first);
  p.summaries = reinterpret_cast<const PanelSummary*>(
      reinterpret_cast<const char*>(rhs.summary) + at);
  p.folded = folds && highest <= kMostFoldedScale;
  p.words = p.folded ? row.folded : row.words;
  p.lhs_scales = row.scales;
  p.corrections = row.corrections;
  p.sums = sums;
  kernels.panels[type]->multiply_row(p);
  const int64_t column = first * kTileColumns, n = rhs.rows;
  const int64_t out_size = problem.out_type == kOutFloat32 ? 4 : 2;
  char* out = static_cast<char*>(problem.out) + (product * n + column) * out_size;
  const int64_t columns = std::min((last - first) * kTileColumns, n - column);
  StoreTile(kernels, problem, product, sums, 1, static_cast<int>(columns), out);
  return true;
}

// False where the general way has to do it: some scales or codes are not tame.
template <class Pool>
bool RunRow(Pool& pool, const MatmulKernels& kernels, const MatmulProblem& problem,
            PanelType type) {
  const int64_t chunks = (problem.lhs.k + kChunk - 1) / kChunk;
  Scratch memory(RowBytes(problem.lhs.k, chunks * (kChunk / problem.lhs.block)));
  std::atomic<bool> done{true};
  for (size_t product = 0; product < problem.products.size(); ++product) {
    const Source lhs = MatrixOf(problem.lhs, problem.products[product].lhs);
    const Source rhs = MatrixOf(problem.rhs, problem.products[product].rhs);
    FetchSummaries(rhs, 0);
    PackedRow row = PackRow(lhs, type, memory.data());
    const bool folds = type == kFloat32 && rhs.element <= kE5M2 &&
                       rhs.scale_kind == kScaleE8M0 && FoldRow(chunks * kChunk, &row);
    const int64_t panels = (rhs.rows + kTileColumns - 1) / kTileColumns;
    // Several tasks a thread, so that none waits long for the last one.
    const int64_t wanted = panels / (4 * pool.num_threads());
    const int64_t step = std::min(kRowPanels, std::max<int64_t>(1, wanted));
    ParallelFor(pool, (panels + step - 1) / step, [&](int64_t task) {
      const int64_t first = task * step, last = std::min(first + step, panels);
      if (!RunRowPanels(kernels, problem, type, static_cast<int64_t>(product), rhs, row, folds,
                        first, last)) {
        done.store(false, std::memory_order_relaxed);
      }
    });
    if (!done.load(std::memory_order_relaxed)) return false;
  }
  return true;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_ROW_H_
