// Dequantizing two-dimensional blocks. Each row of a square is a row of one-dimensional blocks,
// whose scales serve all rows of the square.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_SQUARES_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_SQUARES_INL_H_

#include "casts/dequantize_plain-inl.h"
#include "casts/places.h"

namespace mx::MX_TARGET {
namespace {

template <void (*kRows)(const DequantizePlan& plan, int64_t begin, int64_t end)>
void Squares(const DequantizePlan& plan, int64_t begin, int64_t end) {
  DequantizePlan row = plan;
  row.outer = 1;
  row.num_tensor_scales = plan.tensor_scales == nullptr ? 0 : 1;
  const int64_t width = plan.type == FloatType::kF32 ? 4 : 2;
  const bool bytes =
      plan.kind == ScaleFormatKind::kExponent || plan.kind == ScaleFormatKind::kElement;
  while (begin < end) {
    const int64_t first = begin % plan.blocks_per_row;
    const int64_t last =
        plan.blocks_per_row - first < end - begin ? plan.blocks_per_row : first + end - begin;
    const Square square = SquareOf(plan, begin - first);
    row.scales = static_cast<const char*>(plan.scales) + (begin - first) * (bytes ? 1 : 4);
    row.tensor_scales = TensorScale(plan, square.slice);
    for (int64_t i = 0; i < square.rows; ++i) {
      const int64_t start = square.start + i * plan.length;
      row.codes = plan.codes + start;
      row.out = static_cast<char*>(plan.out) + start * width;
      kRows(row, first, last);
    }
    begin += last - first;
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_SQUARES_INL_H_
