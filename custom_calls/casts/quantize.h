// What the quantizing kernels are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_H_

#include <stdint.h>

#include "common/float_types.h"
#include "common/element_codec.h"
#include "common/isas.h"
#include "common/scale_codec.h"

namespace mx {

// Columns that a task of `columns` takes together: a few cache lines of every dtype.
constexpr int64_t kColumnTile = 64;

// A cast of `[outer, length, inner]` with blocks along `length`.
struct QuantizePlan {
  const void* x;
  FloatType type;
  const int32_t* random_bits;  // shape of x; null unless rounding is stochastic
  const float* tensor_scales;  // null, or one for each `outer / num_tensor_scales` slices
  int64_t num_tensor_scales;
  uint8_t* codes;  // shape of x
  void* scales;    // `[outer, blocks_per_row, inner]` bytes, or float32
  int64_t outer;
  int64_t length;
  int64_t inner;
  int64_t block;
  int64_t blocks_per_row;
  int64_t rows;        // of two-dimensional blocks, `[outer, rows, length]`, inner being 1
  int64_t block_rows;  // of each of them; 0 where blocks have one dimension
  ElementFormat element;
  ScaleRule rule;
  Rounding rounding;
  int32_t num_random_bits;
  // Whether codes may go past the caches, where they lie in whole lines: lines that are written apart
  // from each other, each to be read from memory first, cost more than all else; but small results
  // are read again while they are in the cache.
  bool streams;
};

// Elements from which on results are not expected to stay in a cache.
constexpr int64_t kStreamedElements = 1 << 22;

// Columns of a strip that is cast along both axes at once, of `inner`: whole blocks of the rows and
// whole tiles, few enough that a strip of usual blocks stays in the second-level cache.
MX_INLINE int64_t StripColumns(const QuantizePlan& rows) {
  int64_t step = rows.block;
  while (step % kColumnTile != 0) step += rows.block;
  constexpr int64_t kEnough = 512;
  return step < kEnough ? (kEnough + step - 1) / step * step : step;
}

struct QuantizeKernels {
  // Blocks begin..end - 1 of `outer * blocks_per_row`; inner is 1.
  void (*rows)(const QuantizePlan& plan, int64_t begin, int64_t end);
  // Tiles begin..end - 1 of `outer * blocks_per_row * ceil(inner / kColumnTile)`.
  void (*columns)(const QuantizePlan& plan, int64_t begin, int64_t end);
  // Two-dimensional blocks begin..end - 1 of `outer * ceil(rows / block_rows) * blocks_per_row`.
  void (*squares)(const QuantizePlan& plan, int64_t begin, int64_t end);
  // One array in two casts, whose plans are `rows`, `[outer * length, inner, 1]`, and `columns`,
  // `[outer, length, inner]`: strips begin..end - 1 of
  // `outer * columns.blocks_per_row * ceil(inner / StripColumns(rows))`.
  void (*both)(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin, int64_t end);
  // Patterns of the largest magnitude in runs begin..end - 1, of those blocks that have neither NaN
  // nor Inf. A run is one of `outer` rows where blocks have one dimension and inner is 1, else a row
  // of blocks, of `outer * blocks_per_row`, or of two-dimensional ones.
  void (*amax)(const QuantizePlan& plan, int64_t begin, int64_t end, int32_t* amax);
};

// Of quantize_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(QuantizeKernels, kQuantize)
MX_DECLARE_IN(avx512_vbmi, QuantizeKernels, kQuantize)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_H_
