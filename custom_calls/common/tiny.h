// Tensor scales, of which those near the bottom of float32 do their arithmetic 2^64 times as large,
// exactly: the twin of `lift` and `lower` of mx_jax/codecs/scale.py. Where it runs, a thread keeps
// subnormals.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_TINY_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_TINY_H_

#include <stdint.h>

#include "common/element_codec.h"
#include "common/macros.h"

namespace mx {

// Below 2^-100 a step of the arithmetic may leave the normal numbers.
MX_INLINE bool IsTiny(float tensor_scale) {
  return static_cast<int32_t>(BitsOf(tensor_scale)) < (127 - 100) << 23;
}

// What x, or a scale, is multiplied with, and then what came of it.
MX_INLINE float LiftOf(bool tiny) { return tiny ? PowerOfTwo(64) : 1.0f; }
MX_INLINE float LoweringOf(bool tiny) { return tiny ? PowerOfTwo(-64) : 1.0f; }

// amax, by its pattern, over the largest value that a block scale and an element give; 1 for zeros,
// and else at least the smallest float32.
MX_INLINE float TensorScaleOf(uint32_t amax, float largest_value) {
  if (amax == 0) return 1.0f;
  const bool small = amax < (127 - 64) << 23;
  const float scale = FloatOf(amax) * LiftOf(small) / largest_value * LoweringOf(small);
  return FloatOf(BitsOf(scale) == 0 ? 1 : BitsOf(scale));
}

// What sums are multiplied with, one after the other; mostly the first is 1.
struct Factors {
  float first, last;
};

// The product of two tensor scales, as one factor where it is a normal number; else the larger one
// comes first, for sums to stay in float32's range as long as they can.
MX_INLINE Factors FactorsOf(float left, float right) {
  const float product = left * right;
  const uint32_t magnitude = BitsOf(product) & kAbs;
  if (magnitude >= kHidden && magnitude < kInf) return {1.0f, product};
  return left < right ? Factors{right, left} : Factors{left, right};
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_TINY_H_
