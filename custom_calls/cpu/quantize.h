// What the quantizing kernels are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CPU_QUANTIZE_H_
#define MX_JAX_CUSTOM_CALLS_CPU_QUANTIZE_H_

#include <stdint.h>

#include "common/element_codec.h"
#include "common/scale_codec.h"

namespace mx {

enum class FloatType : int32_t { kF32, kBf16, kF16 };

// Columns that a task of `columns` takes together: a few cache lines of every dtype.
constexpr int64_t kColumnTile = 64;

// A cast of `[outer, length, inner]` with blocks along `length`.
struct QuantizePlan {
  const void* x;
  FloatType type;
  const int32_t* random_bits;  // shape of x; null unless rounding is stochastic
  const float* tensor_scales;  // null, or one for each `outer / num_tensor_scales` slices
  int64_t num_tensor_scales;
  uint8_t* codes;  // shape of x, or `[outer, row_bytes]` where packed
  void* scales;    // `[outer, blocks_per_row, inner]` bytes, or float32
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t block;
  int64_t blocks_per_row;
  int64_t row_bytes;  // of a row of packed codes; 0 where each code has a byte
  ElementFormat element;
  ScaleRule rule;
  Rounding rounding;
  int32_t num_random_bits;
};

struct QuantizeKernels {
  // Blocks begin..end - 1 of `outer * blocks_per_row`; inner is 1.
  void (*rows)(const QuantizePlan& plan, int64_t begin, int64_t end);
  // Tiles begin..end - 1 of `outer * blocks_per_row * ceil(inner / kColumnTile)`; codes not packed.
  void (*columns)(const QuantizePlan& plan, int64_t begin, int64_t end);
};

extern const QuantizeKernels kQuantizePortable;
extern const QuantizeKernels kQuantizeAvx2;
extern const QuantizeKernels kQuantizeAvx512;

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CPU_QUANTIZE_H_
