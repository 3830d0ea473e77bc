// The largest magnitude of a tensor, as formats with a tensor scale need it, and two-dimensional
// blocks.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_SQUARES_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_SQUARES_INL_H_

#include "casts/quantize_plain-inl.h"
#include "casts/places.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE uint32_t RunAmax(const float* x, int64_t n) { return AmaxOf(x, n); }

// Patterns order as magnitudes do, so the widest is widened alone.
template <class T>
MX_INLINE uint32_t RunAmax(const T* x, int64_t n) {
  int16_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int16_t magnitude = static_cast<int16_t>(x[i].bits & 0x7fff);
    largest = magnitude > largest ? magnitude : largest;
  }
  T widest;
  widest.bits = static_cast<uint16_t>(largest);
  return BitsOf(Widen(widest));
}

// The same where a NaN or Inf is among `rows` of `columns` values, whose block is left out; rare. All
// rows of `width` columns are a block.
template <class T>
uint32_t FiniteAmax(const T* x, int64_t rows, int64_t columns, int64_t width) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < columns; j += width) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t count = columns - j < width ? columns - j : width;
      const uint32_t part = RunAmax(x + i * columns + j, count);
      amax = part > amax ? part : amax;
    }
    largest = amax < kInf && amax > largest ? amax : largest;
  }
  return largest;
}

template <class T>
void RunsAmax(const QuantizePlan& plan, int64_t begin, int64_t end, int32_t* amax) {
  const T* x = static_cast<const T*>(plan.x);
  // Of `outer` slices, `[length, columns]` with runs of some rows.
  const bool squares = plan.block_rows != 0, single = plan.inner == 1 && !squares;
  const int64_t length = squares ? plan.rows : single ? 1 : plan.length;
  const int64_t columns = squares || single ? plan.length : plan.inner;
  const int64_t high = squares ? plan.block_rows : single ? 1 : plan.block;
  const int64_t width = squares || single ? plan.block : 1;
  const int64_t runs = (length + high - 1) / high;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t slice = index / runs, first = (index - slice * runs) * high;
    const int64_t rows = length - first < high ? length - first : high;
    const T* run = x + (slice * length + first) * columns;
    uint32_t largest = RunAmax(run, rows * columns);
    if (MX_UNLIKELY(largest >= kInf)) largest = FiniteAmax(run, rows, columns, width);
    amax[index] = static_cast<int32_t>(largest);
  }
}

void Amax(const QuantizePlan& plan, int64_t begin, int64_t end, int32_t* amax) {
  ByType(plan.type, [&](auto x) { RunsAmax<decltype(x)>(plan, begin, end, amax); });
}

template <class T>
void QuantizeSquares(const QuantizePlan& plan, int64_t begin, int64_t end) {
  alignas(64) float buffer[kPiece];
  const Magic magic = MagicOf(plan.element);
  const T* x = static_cast<const T*>(plan.x);
  for (int64_t index = begin; index < end; ++index) {
    const Square square = SquareOf(plan, index);
    uint32_t amax = 0;
    for (int64_t i = 0; i < square.rows; ++i) {
      const uint32_t largest = RunAmax(x + square.start + i * plan.length, square.columns);
      amax = largest > amax ? largest : amax;
    }
    const BlockScale scale = ScaleOf(amax, plan.rule, TensorScale(plan, square.slice));
    StoreScale(plan, index, scale.stored);
    for (int64_t i = 0; i < square.rows; ++i) {
      for (int64_t j = 0; j < square.columns; j += kPiece) {
        const int64_t at = square.start + i * plan.length + j;
        const int64_t count = square.columns - j < kPiece ? square.columns - j : kPiece;
        const float* values = WidenRun(x + at, count, buffer);
        const int32_t* random = plan.random_bits == nullptr ? nullptr : plan.random_bits + at;
        EncodeRun(values, count, scale, plan, magic, random, plan.codes + at);
      }
    }
  }
}

void Squares(const QuantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { QuantizeSquares<decltype(x)>(plan, begin, end); });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_SQUARES_INL_H_
