// What the kernels of each instruction set offer to matmul.cc: packing operands into panels,
// multiplying two panels, storing a tile. Every set shares one panel layout.
//
// A product is cut into tiles of kTileRows x kTileColumns. Each operand is first copied into
// panels: kTileRows rows of lhs or kTileColumns rows of rhs, with k outermost. A panel is a row of
// chunks of 32 along k, and a chunk holds, for R rows:
//
//   float    scale[32 / block][R]     of the chunk's blocks, with the elements' own factor
//   int32_t  correction[32 / block][R]   only lhs of kInt8: -128 * (sum of the block)
//   uint32_t element[32 / per_word][R]   words of 4, 2 or 1 consecutive elements
//
// Elements stay unscaled. Within a block they are multiplied and added, for the integer types
// without any rounding; then the block's sum is scaled and added to the float32 tile. E8M0 scales
// are powers of two, so scaling is exact, and every way to do it gives the same bits.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_H_

#include <stdint.h>
#include <string.h>

#include "common/float_types.h"
#include "common/isas.h"
#include "common/macros.h"
#include "products/elements.h"

namespace mx {

constexpr int kTileRows = 6;
constexpr int kTileColumns = 32;
constexpr int kChunk = 32;
// Rows up to which rhs is decoded slice by slice beside its use.
constexpr int64_t kThinRows = 192;
// Panels of lhs are made five at a time: 30 rows fill nearly a vector of 32.
constexpr int kLhsPanelsPerGroup = 5;
constexpr int kLhsGroupRows = kLhsPanelsPerGroup * kTileRows;

enum ScaleKind : int32_t { kNoScale, kScaleE8M0, kScaleE4M3 };
constexpr const char* kScaleNames[] = {"none", "e8m0", "e4m3"};

// kInt8: rhs is stored with 128 added, as vpdpbusd takes one unsigned operand.
enum PanelType : int32_t { kInt8, kInt16, kBf16, kFloat32 };
constexpr int kNumPanelTypes = 4;

// How a block's sum is scaled. kNormal: both scales and their product are normal float32.
// kProduct: any float scales, one product. kWide: E8M0 scales that may be NaN or leave the range.
enum Scaling : int32_t { kNormal, kProduct, kWide };

// Where codes lie. kStrided: as strides say, either row_stride or k_stride being 1. The others hold
// panels of kTileColumns rows, `panel_bytes` apart, of records for kRecordChunks chunks each, ready
// for kernels (see weights.h).
enum Layout : int32_t { kStrided, kPanels4, kPanels6, kPanels8 };

// Bytes of one chunk's codes in a panel.
constexpr int64_t PanelChunkBytes(Layout layout) {
  return kChunk * kTileColumns * (layout == kPanels4 ? 4 : layout == kPanels6 ? 6 : 8) / 8;
}

constexpr int kRecordChunks = 2;

// Bytes of a record's scales: of its chunks' blocks, a byte for each row. Then come its codes.
constexpr int64_t RecordScaleBytes(int32_t block) {
  return kRecordChunks * (kChunk / block) * kTileColumns;
}
constexpr int64_t RecordBytes(Layout layout, int32_t block) {
  return RecordScaleBytes(block) + kRecordChunks * PanelChunkBytes(layout);
}

// What kernels ask about a panel of codes before they take its fast way; the first 64 bytes of it.
struct PanelSummary {
  uint32_t mark;      // kPanelMark
  uint8_t special;    // whether a code is NaN or Inf, or an E4M3 scale is NaN or negative
  uint8_t low, high;  // the smallest and largest scale byte
  uint8_t padding;
  // A bit for each chunk, or for a power of two of them: whether a float of 8 bits is subnormal there.
  uint8_t subnormal[56];
};
static_assert(sizeof(PanelSummary) == 64, "records begin at a cache line");
// Tells panels of this layout from others of the same size, which an exported program or a pickle may
// hold: raised whenever the layout changes.
constexpr uint32_t kPanelMark = 0x4d580002;

// By how many places the index of a chunk is shifted to that of its bit.
MX_INLINE int SummaryShift(int64_t num_chunks) {
  int shift = 0;
  while ((num_chunks - 1) >> shift >= 56 * 8) ++shift;
  return shift;
}

// One operand of one product; strides count elements.
struct Source {
  const void* elements;
  const uint8_t* scales;  // null for kNoScale
  Element element;
  ScaleKind scale_kind;
  int32_t block;  // 16 or 32
  int64_t rows, k;
  int64_t row_stride, k_stride;
  int64_t scale_row_stride, scale_block_stride;
  // Of panels, `elements` points to the first record of the first one, which its summary precedes.
  Layout layout = kStrided;
  int64_t panel_bytes = 0;
};

// The record of a panel that holds a chunk, and what of it is the chunk's codes, a block's scales.
MX_INLINE const uint8_t* RecordAt(const Source& source, int64_t row, int64_t chunk) {
  return (const uint8_t*)source.elements + row / kTileColumns * source.panel_bytes +
         chunk / kRecordChunks * RecordBytes(source.layout, source.block);
}
MX_INLINE const uint8_t* CodesAt(const Source& source, int64_t row, int64_t chunk) {
  return RecordAt(source, row, chunk) + RecordScaleBytes(source.block) +
         chunk % kRecordChunks * PanelChunkBytes(source.layout);
}
MX_INLINE const uint8_t* ScalesAt(const Source& source, int64_t row, int64_t block) {
  const int64_t per_chunk = kChunk / source.block, chunk = block / per_chunk;
  return RecordAt(source, row, chunk) + block % (per_chunk * kRecordChunks) * kTileColumns;
}

// Zero blocks have byte 0, 2^-127. Any scale does for them, and an ordinary one costs nothing.
MX_INLINE bool IsZeroBlock(const Source& source, int64_t row, int64_t block) {
  const int64_t begin = block * source.block;
  int64_t end = begin + source.block;
  if (end > source.k) end = source.k;
  // Both zeros of the float formats, and INT8's only one, which -128 is not.
  const bool is_int = source.element == kElementInt8;
  const uint8_t magnitude = is_int ? 0xff : (uint8_t)((1 << (ElementBits(source.element) - 1)) - 1);
  const uint8_t* p = (const uint8_t*)source.elements + row * source.row_stride;
  for (int64_t k = begin; k < end; ++k) {
    if (p[k * source.k_stride] & magnitude) return false;
  }
  return true;
}

// The scale bytes of a block of `width` rows, of kTileColumns: those of 1 where there is no such block
// or row, and of blocks of zeros.
MX_INLINE void LoadScaleBytes(const Source& source, int64_t first_row, int64_t block, int width,
                              uint8_t* bytes) {
  const bool packed = source.layout != kStrided, powers = source.scale_kind != kScaleE4M3;
  memset(bytes, powers ? 127 : 0x38, kTileColumns);
  if (source.scale_kind == kNoScale || block * source.block >= source.k) return;
  const int64_t there = source.rows - first_row, left = there < width ? there : width;
  const int64_t step = packed ? 1 : source.scale_row_stride;
  const uint8_t* from = packed ? ScalesAt(source, first_row, block)
                               : source.scales + first_row * step + block * source.scale_block_stride;
  if (step == 1 && left >= kTileColumns) {
    memcpy(bytes, from, kTileColumns);
  } else {
    for (int64_t i = 0; i < kTileColumns && i < left; ++i) bytes[i] = from[i * step];
  }
  if (packed || !powers) return;
  uint8_t low = 255;
  for (int i = 0; i < kTileColumns; ++i) low = bytes[i] < low ? bytes[i] : low;
  for (int i = 0; low < 32 && i < kTileColumns; ++i) {
    if (bytes[i] < 32 && IsZeroBlock(source, first_row + i, block)) bytes[i] = 127;
  }
}

// Exponents of a panel's scales: a zero block has none, a NaN is larger than any.
struct ScaleRange {
  int32_t low = 1000;
  int32_t high = -1000;
};

// Whether kernels may multiply a panel as codes, by lhs with such scales.
MX_INLINE bool IsTame(const PanelSummary& panel, ScaleKind kind, const ScaleRange& lhs) {
  if (panel.special) return false;
  return kind == kScaleE4M3 ||
         (panel.low >= 47 && panel.high <= 207 && lhs.low >= -40 && lhs.high <= 40);
}

// Tables by code, filled once; see tables.cc.
struct ElementTables {
  int8_t int8[256];
  int16_t int16[256];
  uint16_t bf16[256];
  float float32[256];
};
const ElementTables& TablesOf(Element element);
// 256 float32 scales, times the factor that the integers of a panel type were multiplied with.
const float* ScaleTable(ScaleKind kind, Element element, PanelType type);

// A few rows of lhs by one panel of codes (weights.h), to a tile. The panel is not special, and all
// scales are within 2^-80 .. 2^80, those of lhs within 2^-40 .. 2^40.
struct CodesProduct {
  Element element;
  ScaleKind scale_kind;
  int32_t block;
  int64_t num_chunks;
  const char* records;
  const PanelSummary* summary;
  bool folded;  // whether lhs has the factor kFoldLhs: see thin.h
  const char* lhs;  // a panel of `rows` rows
  int rows;         // as FewRows says
  float* tile;
  bool clear;
};

// The first `rows` rows of lhs at least, by a panel of rhs, over num_chunks chunks, to a tile:
// tile = (clear ? 0 : tile) + lhs panel * rhs panel.
struct PanelProduct {
  Element lhs_element, rhs_element;
  int rows;
  int32_t block;
  Scaling scaling;
  int64_t num_chunks;
  const char* lhs;
  const char* rhs;
  float* tile;
  bool clear;
};

// How many rows of lhs a panel for multiply_codes has, where so many are left, of `most` at most.
constexpr int FewRows(int64_t left, int most) {
  return left > 12 && most > 8 ? 16 : left > 4 ? 8 : left > 2 ? 4 : (int)left;
}

// What decoding floats of 8 bits to float32 leaves out, a large power of two, goes in part to lhs.
// Then no value is decoded with a multiplication of its own.
constexpr float kFoldLhs = 0x1p60f;
// The scales take the rest, up to 2^60: the largest of them, by the largest of lhs, stay in float32.
constexpr uint8_t kMostFoldedScale = 127 + 27;

// The kernels of one panel type.
struct PanelKernels {
  // Packs kLhsGroupRows rows of lhs, or kTileColumns rows of rhs, from first_row on, all of k; rows
  // beyond the last become zeros. Lhs panels lie `stride` bytes apart.
  void (*pack_lhs)(const Source& source, int64_t first_row, char* out, int64_t stride,
                   ScaleRange* range);
  void (*pack_rhs)(const Source& source, int64_t first_row, char* out, ScaleRange* range);
  // Packs one panel of 1 to 16 rows of lhs, which may write 60 bytes beyond its end.
  void (*pack_few)(const Source& source, int64_t first_row, int rows, char* out, ScaleRange* range);
  void (*multiply)(const PanelProduct& product);
  // The same for a panel of codes, decoded on its way, and FewRows rows; null where unpacking it
  // first is as fast.
  void (*multiply_codes)(const CodesProduct& product);
  // The same for kTileRows rows, not folded, which also keeps the panel as pack_rhs gives it, for
  // the rows that follow; null where decoding it anew for them is as fast.
  void (*multiply_keeping)(const CodesProduct& product, char* keep);
  // The most rows that multiply_codes takes, 8 or 16; and by how many of the first elements it takes
  // them times kFoldLhs.
  int most_few = 8;
  int folded = 0;
  // Rows up to which packed codes are decoded anew for every few of them, and whether others are.
  int64_t most_anew = 60;
  bool packs_strided = true;
  // Whether sums of two products have to fit int16, as those of INT8 by INT8 do not.
  bool adds_pairs = false;
};

// The kernels of one instruction set.
struct MatmulKernels {
  // Null for a panel type that it does not multiply; never for kFloat32.
  const PanelKernels* panels[kNumPanelTypes];
  // Copies codes and scales of kTileColumns rows, from first_row on, into a panel (weights.h).
  void (*pack_codes)(const Source& source, int64_t first_row, uint8_t* out);
  // Rounds alpha * tile[rows][columns] to the output's type, once.
  void (*store)(const float* tile, int rows, int columns, float alpha, FloatType type, void* out,
                int64_t out_stride);
};

constexpr int64_t BytesPerElement(PanelType type) {
  return type == kInt8 ? 1 : type == kFloat32 ? 4 : 2;
}
constexpr int64_t ChunkBytes(PanelType type, int32_t block, int64_t rows, bool is_lhs) {
  return rows *
         (kChunk / block * (is_lhs && type == kInt8 ? 8 : 4) + kChunk * BytesPerElement(type));
}

// `count` chunks of a source, from chunk `first` on; of panels, from a record's first.
static inline Source SliceOf(const Source& source, int64_t first, int64_t count) {
  Source slice = source;
  if (source.layout == kStrided) {
    const int64_t blocks = first * (kChunk / source.block);
    slice.elements = (const char*)source.elements +
                     first * kChunk * source.k_stride * ElementBytes(source.element);
    if (source.scales != nullptr) slice.scales += blocks * source.scale_block_stride;
  } else {
    slice.elements = RecordAt(source, 0, first);
  }
  slice.k = source.k - first * kChunk;
  if (slice.k > count * kChunk) slice.k = count * kChunk;
  return slice;
}

// Of matmul_kernels.cc, compiled for each set. What one does not speed up, it takes from another.
MX_DECLARE_PRODUCT_KERNELS(MatmulKernels, kMatmul)
namespace avx512 {
extern const PanelKernels kFloat32Panels;
}  // namespace avx512

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_KERNELS_H_
