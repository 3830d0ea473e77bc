// What the dequantizing kernels are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_H_

#include <stdint.h>

#include "casts/quantize.h"
#include "common/element_codec.h"
#include "common/isas.h"
#include "common/scale_codec.h"

namespace mx {

// `[outer, length, inner]` with blocks along `length`; see QuantizePlan.
struct DequantizePlan {
  const uint8_t* codes;
  const void* scales;
  const float* tensor_scales;
  int64_t num_tensor_scales;
  void* out;
  FloatType type;
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t block;
  int64_t blocks_per_row;
  int64_t rows;        // of two-dimensional blocks, `[outer, rows, length]`, inner being 1
  int64_t block_rows;  // of each of them; 0 where blocks have one dimension
  int64_t ahead;       // codes that far ahead are fetched from memory: those of the next plan
  ElementFormat element;
  ScaleFormatKind kind;
  float values[256];        // of every code
  float scale_values[256];  // of kElement: of every scale
};

// What the codes of a plan mean; scale_element: of kElement.
MX_INLINE void SetFormat(const ElementFormat& element, ScaleFormatKind kind,
                         const ElementFormat& scale_element, DequantizePlan* plan) {
  plan->element = element, plan->kind = kind;
  for (int32_t code = 0; code < 256; ++code) plan->values[code] = Decode(code, element);
  for (int32_t code = 0; kind == ScaleFormatKind::kElement && code < 256; ++code) {
    plan->scale_values[code] = Decode(code, scale_element);
  }
}

struct DequantizeKernels {
  // Blocks begin..end - 1 of `outer * blocks_per_row`; inner is 1.
  void (*rows)(const DequantizePlan& plan, int64_t begin, int64_t end);
  // Tiles begin..end - 1 of `outer * blocks_per_row * ceil(inner / kColumnTile)`.
  void (*columns)(const DequantizePlan& plan, int64_t begin, int64_t end);
  // Two-dimensional blocks begin..end - 1 of `outer * ceil(rows / block_rows) * blocks_per_row`.
  void (*squares)(const DequantizePlan& plan, int64_t begin, int64_t end);
};

// Of dequantize_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(DequantizeKernels, kDequantize)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_H_
