// What the kernels of block Hadamard transforms are given, and the table of them for each set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_TRANSFORM_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_TRANSFORM_H_

#include <stdint.h>

#include "common/float_types.h"
#include "common/isas.h"

namespace mx {

constexpr int64_t kMaxTransform = 1024;  // values of a group

// Groups of `size` values along an axis, of `inner` columns each; `x` and `out` at their first group.
struct TransformPlan {
  const void* x;
  FloatType type;
  const int32_t* signs;  // [size], by which of them are negative
  float* out;
  int64_t size;    // a power of two
  int64_t length;  // values of x along the axis: what the last group has no more is zero
  int64_t inner;
};

struct TransformKernels {
  // Groups first..last - 1 of `[length, inner]`.
  void (*groups)(const TransformPlan& plan, int64_t first, int64_t last);
};

// Of transform_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(TransformKernels, kTransform)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_TRANSFORM_H_
