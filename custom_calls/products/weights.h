// Weights in the order in which kernels read them, packed once: panels of kTileColumns rows with all
// of k, each one stream from its first byte to its last.
//
// A panel begins with its PanelSummary. Records follow, each for 64 positions along k: first their
// scale bytes, [blocks][row], then the codes of two chunks of 32. A chunk holds words of 4 codes of
// each row (kPanels8), or of 8 codes of at most 4 bits (kPanels4): the low half of byte b is code b
// of 8, the high half code 4 + b. Codes of 6 bits (kPanels6) lie 16 to three words: four in each, and
// in bits 6 and 7 of byte b of these words code 12 + b, its lowest bits in the first. So twelve of
// them are where a look-up of 64 codes wants them, and four take five instructions for a vector of
// each.
//
// Rows and k are padded: with codes 0 under scale 1. A block of zeros has E8M0 scale 1 too, if its
// own was small. Every instruction set reads this one layout, for any number of rows.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_WEIGHTS_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_WEIGHTS_H_

#include <cstdint>

#include "products/kernels.h"

namespace mx {

constexpr Layout LayoutOf(Element element) {
  const int bits = ElementBits(element);
  return bits == 4 ? kPanels4 : bits == 6 ? kPanels6 : kPanels8;
}

struct WeightSizes {
  int64_t panels;
  int64_t records;  // of a panel
  int64_t panel_bytes;
};

MX_INLINE WeightSizes SizesOfWeights(Element element, int32_t block, int64_t rows, int64_t k) {
  const int64_t chunks = (k + kChunk - 1) / kChunk;
  WeightSizes sizes;
  sizes.panels = (rows + kTileColumns - 1) / kTileColumns;
  sizes.records = (chunks + kRecordChunks - 1) / kRecordChunks;
  sizes.panel_bytes = static_cast<int64_t>(sizeof(PanelSummary)) +
                      sizes.records * RecordBytes(LayoutOf(element), block);
  return sizes;
}

// What kernels read: `packed` holds the panels of `like`, whose elements are not looked at.
MX_INLINE Source PackedSource(const Source& like, const uint8_t* packed) {
  const WeightSizes sizes = SizesOfWeights(like.element, like.block, like.rows, like.k);
  Source source = like;
  source.elements = packed + sizeof(PanelSummary);
  source.scales = nullptr;
  source.layout = LayoutOf(like.element);
  source.panel_bytes = sizes.panel_bytes;
  source.row_stride = source.k_stride = 0;
  source.scale_row_stride = 1;
  source.scale_block_stride = 0;
  return source;
}

MX_INLINE const PanelSummary& SummaryOf(const Source& packed, int64_t panel) {
  const char* records = (const char*)packed.elements + panel * packed.panel_bytes;
  return ((const PanelSummary*)records)[-1];
}

// Whether one of some chunks has subnormal codes.
MX_INLINE bool HasSubnormals(const PanelSummary& summary, int64_t first, int64_t last, int shift) {
  for (int64_t bit = first >> shift; bit <= last >> shift; ++bit) {
    if (summary.subnormal[bit / 8] >> bit % 8 & 1) return true;
  }
  return false;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_WEIGHTS_H_
