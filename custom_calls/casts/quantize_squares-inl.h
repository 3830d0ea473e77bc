// Quantizing in two-dimensional blocks.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_SQUARES_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_SQUARES_INL_H_

#include "casts/amax-inl.h"
#include "casts/quantize_plain-inl.h"
#include "casts/places.h"

namespace mx::MX_TARGET {
namespace {

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
