#include "products/weights.h"

#include <algorithm>
#include <cstring>

namespace mx {
namespace {

// A code without what its format does not use, and 0 beyond the ends.
uint8_t CodeAt(const Source& source, int64_t row, int64_t k) {
  if (row >= source.rows || k >= source.k) return 0;
  const uint8_t code =
      static_cast<const uint8_t*>(source.elements)[row * source.row_stride + k * source.k_stride];
  return static_cast<uint8_t>(code & ((1 << ElementBits(source.element)) - 1));
}

// Adds a row's code of position k of a chunk to the zeros of its codes.
void PutCode(Layout layout, int64_t row, int64_t k, int code, uint8_t* codes) {
  constexpr int64_t kWord = kTileColumns * 4;  // bytes of one word of each row
  uint8_t* to = codes + row * 4 + k % 4;
  const auto add = [to](int64_t word, int bits) {
    to[word * kWord] = static_cast<uint8_t>(to[word * kWord] | bits);
  };
  if (layout == kPanels8) return add(k / 4, code);
  if (layout == kPanels4) return add(k / 8, k % 8 >= 4 ? code << 4 : code);
  const int64_t first = k / 16 * 3, word = k % 16 / 4;
  if (word < 3) return add(first + word, code);
  for (int i = 0; i < 3; ++i) add(first + i, (code >> 2 * i & 3) << 6);
}

// NaN or Inf, or what no scale of a kernel's fast way may be.
bool IsSpecialCode(Element element, uint8_t code) {
  return element == kE4M3 ? (code & 0x7f) == 0x7f : element == kE5M2 && (code & 0x7c) == 0x7c;
}

bool IsSubnormalCode(Element element, uint8_t code) {
  const uint8_t fraction = element == kE4M3 ? 7 : 3, magnitude = code & 0x7f;
  return element <= kE5M2 && magnitude != 0 && magnitude <= fraction;
}

}  // namespace

void PackCodesPortable(const Source& source, int64_t first_row, uint8_t* out) {
  const WeightSizes sizes = SizesOfWeights(source.element, source.block, source.rows, source.k);
  const Source packed = PackedSource(source, out);
  std::memset(out, 0, static_cast<size_t>(sizes.panel_bytes));
  PanelSummary summary{};
  summary.mark = kPanelMark;
  const int shift = SummaryShift((source.k + kChunk - 1) / kChunk);
  for (int64_t row = 0; row < kTileColumns; ++row) {
    for (int64_t k = 0; k < source.k; ++k) {
      const uint8_t code = CodeAt(source, first_row + row, k);
      summary.special |= IsSpecialCode(source.element, code);
      if (IsSubnormalCode(source.element, code)) {
        const int64_t bit = k / kChunk >> shift;
        summary.subnormal[bit / 8] |= static_cast<uint8_t>(1 << bit % 8);
      }
      uint8_t* codes = const_cast<uint8_t*>(CodesAt(packed, 0, k / kChunk));
      PutCode(packed.layout, row, k % kChunk, code, codes);
    }
  }
  const int64_t given = (source.k + source.block - 1) / source.block;
  const int64_t blocks = sizes.records * kRecordChunks * (kChunk / source.block);
  const uint8_t one = source.scale_kind == kScaleE8M0 ? 127 : 0x38;
  summary.low = summary.high = one;
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* scales = const_cast<uint8_t*>(ScalesAt(packed, 0, block));
    std::memset(scales, one, kTileColumns);
    if (block >= given) continue;
    for (int64_t row = 0; row < kTileColumns && first_row + row < source.rows; ++row) {
      uint8_t byte = source.scales[(first_row + row) * source.scale_row_stride +
                                   block * source.scale_block_stride];
      const bool small = source.scale_kind == kScaleE8M0 && byte < 32;
      if (small && IsZeroBlock(source, first_row + row, block)) byte = one;
      summary.low = std::min(summary.low, byte);
      summary.high = std::max(summary.high, byte);
      summary.special |= source.scale_kind == kScaleE4M3 && byte >= 0x7f;
      scales[row] = byte;
    }
  }
  std::memcpy(out, &summary, sizeof summary);
}

}  // namespace mx
