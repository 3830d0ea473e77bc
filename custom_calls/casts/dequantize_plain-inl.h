// The dequantizing kernels in plain C++, which compilers turn into vectors.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_

#include "casts/dequantize.h"
#include "casts/places.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// What the value of a code is multiplied with, or divided by.
MX_INLINE float ScaleAt(const DequantizePlan& plan, int64_t index, const float* tensor) {
  if (plan.kind == ScaleFormatKind::kExponent) {
    return DecodeE8m0(static_cast<const uint8_t*>(plan.scales)[index]);
  }
  if (plan.kind != ScaleFormatKind::kElement) {
    return static_cast<const float*>(plan.scales)[index];
  }
  const float scale =
      Decode(static_cast<const uint8_t*>(plan.scales)[index], plan.scale_element);
  return tensor == nullptr ? scale : *tensor * scale;
}

// The scale of byte 0, which blocks of zeros have, is subnormal: it costs a hundred times as much on
// some processors. Twice that scale is not; values are halved for it, which is exact.
MX_INLINE bool IsSubnormal(const DequantizePlan& plan, float scale) {
  return plan.kind == ScaleFormatKind::kExponent && (BitsOf(scale) & kAbs) < kHidden;
}

// n values that share one scale.
template <class T>
MX_INLINE void DecodeRun(const DequantizePlan& plan, const uint8_t* codes, int64_t n, float scale,
                         T* out) {
  if (plan.kind == ScaleFormatKind::kDivisor) {
    for (int64_t i = 0; i < n; ++i) StoreValue(out + i, plan.values[codes[i]] / scale);
  } else if (IsSubnormal(plan, scale)) {
    for (int64_t i = 0; i < n; ++i) {
      StoreValue(out + i, plan.values[codes[i]] * 0.5f * FloatOf(kHidden));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) StoreValue(out + i, plan.values[codes[i]] * scale);
  }
}

template <class T>
void RowBlock(const DequantizePlan& plan, int64_t index) {
  const int64_t row = index / plan.blocks_per_row;
  const int64_t first = (index - row * plan.blocks_per_row) * plan.block;
  const int64_t rest = plan.length - first;
  const int64_t n = rest < plan.block ? rest : plan.block;
  const int64_t start = row * plan.length + first;
  const float scale = ScaleAt(plan, index, TensorScale(plan, row));
  DecodeRun(plan, plan.codes + start, n, scale, static_cast<T*>(plan.out) + start);
}

template <class T>
void RowBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) RowBlock<T>(plan, index);
}

template <class T>
void ColumnBlock(const DequantizePlan& plan, int64_t index) {
  const ColumnPlace place = PlaceOf(plan, index);
  const int64_t columns = place.columns;
  float scales[kColumnTile], halves[kColumnTile];
  for (int64_t j = 0; j < columns; ++j) {
    scales[j] = ScaleAt(plan, place.scale + j, TensorScale(plan, place.slice));
    const bool subnormal = IsSubnormal(plan, scales[j]);
    if (subnormal) scales[j] = FloatOf(kHidden);
    halves[j] = subnormal ? 0.5f : 1.0f;
  }
  for (int64_t i = 0; i < place.rows; ++i) {
    const uint8_t* codes = plan.codes + place.start + i * plan.inner;
    T* out = static_cast<T*>(plan.out) + place.start + i * plan.inner;
    if (plan.kind == ScaleFormatKind::kDivisor) {
      for (int64_t j = 0; j < columns; ++j) StoreValue(out + j, plan.values[codes[j]] / scales[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        StoreValue(out + j, plan.values[codes[j]] * halves[j] * scales[j]);
      }
    }
  }
}

template <class T>
void ColumnBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) ColumnBlock<T>(plan, index);
}

void Rows(const DequantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { RowBlocks<decltype(x)>(plan, begin, end); });
}

void Columns(const DequantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { ColumnBlocks<decltype(x)>(plan, begin, end); });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_
