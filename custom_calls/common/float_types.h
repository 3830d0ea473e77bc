// The dtypes of values: from float32 and to it. Included by kernels: see target.h.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_TYPES_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_TYPES_H_

#include <stdint.h>

#include "common/element_codec.h"
#include "common/macros.h"

namespace mx {

enum class FloatType : int32_t { kF32, kBf16, kF16 };
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

MX_INLINE int64_t SizeOf(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

// Calls `run` with a value of that type, which only tells the type.
template <class Run>
MX_INLINE void ByType(FloatType type, const Run& run) {
  switch (type) {
    case FloatType::kF32:
      return run(float{});
    case FloatType::kBf16:
      return run(Bf16{});
    case FloatType::kF16:
      return run(F16{});
  }
}

MX_INLINE float Widen(float x) { return x; }
MX_INLINE float Widen(Bf16 x) { return FloatOf(static_cast<uint32_t>(x.bits) << 16); }
MX_INLINE float Widen(F16 x) {
  // The exponent moves by 112. A subnormal gets a leading bit of 2^-14, which is taken out again: to
  // multiply a subnormal float32 costs a hundred times as much on some processors.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t leading = 113u << 23;
  const uint32_t small = BitsOf(FloatOf(magnitude + leading) - FloatOf(leading));
  const uint32_t finite = magnitude < kHidden ? small : magnitude + (112u << 23);
  const uint32_t special = magnitude | kInf;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  return FloatOf(sign | (magnitude >= (0x7c00u << 13) ? special : finite));
}

// Rounded once, to nearest even; a NaN becomes the one NaN that the reference gives.
MX_INLINE uint16_t ToBf16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & kAbs) > kInf) return static_cast<uint16_t>(kNan >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

MX_INLINE uint16_t ToF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & kAbs;
  const uint32_t sign = (bits >> 16) & 0x8000;
  if (magnitude > kInf) return 0x7e00;
  if (magnitude >= (142u << 23) + 0x7ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < (113u << 23)) {
    // Adding 0.5 aligns the last bit of float32 with that of a subnormal half.
    const uint32_t sum = BitsOf(FloatOf(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - BitsOf(0.5f)));
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

MX_INLINE void StoreValue(float* out, float value) {
  *out = (BitsOf(value) & kAbs) > kInf ? FloatOf(kNan) : value;
}

MX_INLINE void StoreValue(Bf16* out, float value) { out->bits = ToBf16(value); }
MX_INLINE void StoreValue(F16* out, float value) { out->bits = ToF16(value); }

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_FLOAT_TYPES_H_
