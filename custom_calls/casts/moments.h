// What the kernels of optimizers' moments are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_MOMENTS_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_MOMENTS_H_

#include <stdint.h>

#include "common/isas.h"

namespace mx {

constexpr int kMomentBlock = 32;

// A moment in MXFP8 (E4M3), or the root of one, with the step from it to the next: rows of whole
// blocks, one after the other, as mx_jax/reference/moments.py defines what becomes of them.
struct MomentPlan {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* added;  // the next moment is keep * moment + add * added, or of added squared
  float keep, add;
  bool is_root;    // whether codes are of roots
  bool is_square;  // whether what is added is squared
  uint32_t words[2];
  uint8_t* out_codes;
  uint8_t* out_scales;
};

struct MomentKernels {
  // The blocks begin..end - 1.
  void (*step)(const MomentPlan& plan, int64_t begin, int64_t end);
};

// Of moments_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(MomentKernels, kMoments)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_MOMENTS_H_
