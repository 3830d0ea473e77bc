// Panels of codes (weights.h) by one to eight rows, decoded on their way. Adds in the order in which
// an unpacked panel is added, so the bits are the same. An instruction set gives `CodeTable`,
// `AddChunk`, `kLifts` and `PrefetchAhead`.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_ROWS_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_ROWS_INL_H_

#if defined(__aarch64__)
#include "products/codes_neon-inl.h"
#else
#include "products/codes_avx2-inl.h"
#endif

namespace mx::MX_TARGET {
namespace {

template <PanelType kType, Element kElement, int kBlocks, int kRows>
void MultiplyCodesOf(const CodesProduct& p) {
  constexpr Layout kLayout = LayoutOf(kElement);
  constexpr bool kMayLift =
      kLifts && kType == kFloat32 && (kElement == kE4M3 || kElement == kE5M2);
  constexpr int64_t kBytes = RecordBytes(kLayout, kChunk / kBlocks) / kRecordChunks;
  constexpr int64_t kLhsChunk = ChunkBytes(kType, kChunk / kBlocks, kRows, true);
  const CodeTable<kElement> table;
  const float unit =
      ScaleTable(p.scale_kind, kElement, kType)[p.scale_kind == kScaleE8M0 ? 127 : 0x38];
  const int shift = kMayLift ? SummaryShift(p.num_chunks) : 0;
  for (int i = 0; p.clear && i < kRows * kTileColumns; ++i) p.tile[i] = 0.0f;
  for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
    const uint8_t* record =
        (const uint8_t*)p.records + chunk / kRecordChunks * (kRecordChunks * kBytes);
    const int64_t part = chunk % kRecordChunks;
    const uint8_t* codes =
        record + RecordScaleBytes(kChunk / kBlocks) + part * PanelChunkBytes(kLayout);
    const uint8_t* scales = record + part * kBlocks * kTileColumns;
    for (int64_t line = part * kBytes; line < (part + 1) * kBytes; line += 64) {
      PrefetchAhead(record + line);
    }
    const char* left = p.lhs + chunk * kLhsChunk;
    if (kMayLift && HasSubnormals(*p.summary, chunk, chunk, shift)) {
      AddChunk<kType, kElement, kBlocks, kRows, kMayLift>(p, table, codes, scales, left, unit);
    } else {
      AddChunk<kType, kElement, kBlocks, kRows, false>(p, table, codes, scales, left, unit);
    }
  }
}

template <PanelType kType, Element kElement, int kBlocks>
MX_INLINE void MultiplyCodesRows(const CodesProduct& p) {
  if (p.rows == 1) return MultiplyCodesOf<kType, kElement, kBlocks, 1>(p);
  if (p.rows == 2) return MultiplyCodesOf<kType, kElement, kBlocks, 2>(p);
  if (p.rows == 4) return MultiplyCodesOf<kType, kElement, kBlocks, 4>(p);
  MultiplyCodesOf<kType, kElement, kBlocks, 8>(p);
}

template <PanelType kType>
void MultiplyCodes(const CodesProduct& p) {
  ByElement(p.element, [&p](auto element) {
    constexpr Element kElement = decltype(element)::value;
    constexpr bool kHeld = kType == kInt8 ? FitsInt8(kElement) : FitsInt16(kElement);
    if constexpr (kType == kFloat32 || kHeld) {
      if (p.block == kChunk) return MultiplyCodesRows<kType, kElement, 1>(p);
      MultiplyCodesRows<kType, kElement, 2>(p);
    }
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_CODES_ROWS_INL_H_
