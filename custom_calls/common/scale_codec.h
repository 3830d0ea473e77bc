// From a block's largest magnitude to its stored scale: the twin of mx_jax/reference/scale_rules.py.
// OCP MX v1.0, sections 5.4.1 and 6.3. Included by kernels: see target.h.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_SCALE_CODEC_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_SCALE_CODEC_H_

#include "common/element_codec.h"

namespace mx {

constexpr int32_t kE8m0Nan = 255;

enum class ScaleFormatKind : int32_t { kExponent, kElement, kDivisor, kMultiplier };

// A scale rule, for one element format.
struct ScaleRule {
  ScaleFormatKind kind;
  // kExponent: the exponent goes up by one from this 23-bit mantissa on.
  int32_t threshold;
  int32_t emax;  // of the element
  // The others: the element's largest value; kElement: the scale's own format, its smallest scale;
  // kDivisor: the smallest amax, what smaller ones get, whether scales go down to a power of two.
  float target;
  ElementFormat scale_element;
  float smallest;
  bool power_of_two;
  float scale_of_tiny;
};

// What quantizing a block needs to know.
struct BlockScale {
  uint32_t stored;  // a byte, or the pattern of a float32
  float factor;     // x * factor (kMultiplier: x / factor) is encoded
  bool is_nan;      // the whole block is NaN
};

// 2^(127 - byte): exact for every byte but NaN's, 2^-127 being a subnormal.
MX_INLINE float InverseE8m0(int32_t byte) {
  return byte == 254 ? FloatOf(0x00400000u) : FloatOf(static_cast<uint32_t>(254 - byte) << 23);
}

// 2^(byte - 127), or NaN.
MX_INLINE float DecodeE8m0(int32_t byte) {
  if (byte == kE8m0Nan) return FloatOf(kNan);
  return byte == 0 ? FloatOf(0x00400000u) : FloatOf(static_cast<uint32_t>(byte) << 23);
}

// The byte of a finite amax, given by its pattern.
//
// Adding 2^23 - threshold to the pattern carries into the exponent exactly if the mantissa reaches
// the threshold. A subnormal (1 + m / 2^23) * 2^-127 or less has the byte 0, but for elements with
// emax = 0 (INT8), whose rule may still go up by one.
MX_INLINE int32_t E8m0OfAmax(uint32_t amax, int32_t threshold, int32_t emax) {
  if (amax < kHidden) {
    if (emax > 0 || amax < (kHidden >> 1)) return 0;
    return 2 * (static_cast<int32_t>(amax) - (1 << 22)) >= threshold ? 1 - emax : 0;
  }
  const int32_t raised = static_cast<int32_t>((amax + ((1u << 23) - threshold)) >> 23) - emax;
  return raised < 0 ? 0 : raised > 254 ? 254 : raised;
}

MX_INLINE BlockScale ScaleOfElement(uint32_t amax, const ScaleRule& rule, const float* tensor) {
  float scale = FloatOf(amax < kInf ? amax : 0) / rule.target;
  if (tensor != nullptr) scale = scale / *tensor;
  const float largest = MaxOf(rule.scale_element);
  // A NaN passes both comparisons, as it should.
  if (scale < rule.smallest) scale = rule.smallest;
  if (scale > largest) scale = largest;
  const int32_t code = HalfOf(scale, MagicOf(rule.scale_element));
  BlockScale block;
  block.is_nan = amax >= kInf || scale != scale;
  block.stored = static_cast<uint32_t>(block.is_nan ? rule.scale_element.nan_code : code);
  const float stored = Decode(static_cast<int32_t>(block.stored), rule.scale_element);
  // x * ((1 / p) / s), in this order: NVFP4's own arithmetic, each step rounded.
  block.factor = tensor == nullptr ? 1.0f / stored : (1.0f / *tensor) / stored;
  return block;
}

MX_INLINE BlockScale ScaleOfFloat(uint32_t amax, const ScaleRule& rule) {
  BlockScale block;
  block.is_nan = amax >= kInf;
  const float largest = FloatOf(amax);
  float scale;
  if (rule.kind == ScaleFormatKind::kDivisor) {
    scale = largest < rule.smallest ? rule.scale_of_tiny : rule.target / largest;
    if (rule.power_of_two) scale = FloatOf(BitsOf(scale) & kInf);
  } else {
    scale = largest / rule.target;
    const float smallest = FloatOf((127u - 100u) << 23);  // 2^-100, far from subnormals
    scale = amax == 0 ? 1.0f : scale < smallest ? smallest : scale;
  }
  block.stored = block.is_nan ? kNan : BitsOf(scale);
  block.factor = scale;
  return block;
}

// The scale of a block, given the pattern of its amax; tensor: its tensor scale, or null.
MX_INLINE BlockScale ScaleOf(uint32_t amax, const ScaleRule& rule, const float* tensor) {
  if (rule.kind == ScaleFormatKind::kExponent) {
    BlockScale block;
    block.is_nan = amax >= kInf;
    const int32_t byte = block.is_nan ? kE8m0Nan : E8m0OfAmax(amax, rule.threshold, rule.emax);
    block.stored = static_cast<uint32_t>(byte);
    block.factor = block.is_nan ? 1.0f : InverseE8m0(byte);
    return block;
  }
  if (rule.kind == ScaleFormatKind::kElement) return ScaleOfElement(amax, rule, tensor);
  return ScaleOfFloat(amax, rule);
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_SCALE_CODEC_H_
