// Element formats as numbers, and one code at a time: the twin of mx_jax/codecs/element.py.
// OCP Microscaling Formats (MX) v1.0, sections 5.3 and 6.3. Included by kernels: see target.h.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_ELEMENT_CODEC_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_ELEMENT_CODEC_H_

#include <stdint.h>
#include <string.h>

#include "common/macros.h"

namespace mx {

// Patterns of float32.
constexpr uint32_t kAbs = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;
constexpr uint32_t kNan = 0x7fc00000u;
constexpr uint32_t kMantissa = 0x007fffffu;
constexpr uint32_t kHidden = 0x00800000u;

MX_INLINE uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MX_INLINE float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The independent facts of mx_jax.formats.ElementFormat, in the order of the attribute `element`.
struct ElementFacts {
  int32_t exponent_bits;
  int32_t mantissa_bits;
  int32_t bias;
  int32_t num_reserved_codes;
  int32_t has_inf;
  int32_t is_integer;
  int32_t has_negative_zero;
  int32_t negative_extra;
};
constexpr int kNumElementFacts = 8;

// What follows from the facts.
struct ElementFormat {
  int32_t mantissa_bits;
  int32_t emin;  // unbiased exponent of the smallest normal
  int32_t emax;  // unbiased exponent of the largest finite value
  int32_t bits;
  int32_t sign_code;
  int32_t max_code;
  int32_t nan_code;  // -1 where there is none
  int32_t inf_code;  // -1 where there is none
  int32_t is_integer;
  int32_t has_negative_zero;
  int32_t negative_extra;
};

MX_INLINE ElementFormat Derive(const ElementFacts& facts) {
  ElementFormat element;
  element.mantissa_bits = facts.mantissa_bits;
  element.emin = 1 - facts.bias;
  element.bits = 1 + facts.exponent_bits + facts.mantissa_bits;
  element.sign_code = 1 << (element.bits - 1);
  element.max_code = element.sign_code - 1 - facts.num_reserved_codes;
  element.emax = (element.max_code >> facts.mantissa_bits) - facts.bias;
  const bool fnuz = !facts.has_negative_zero && !facts.is_integer;
  element.nan_code =
      fnuz ? element.sign_code : facts.num_reserved_codes ? element.sign_code - 1 : -1;
  element.inf_code = facts.has_inf ? element.max_code + 1 : -1;
  element.is_integer = facts.is_integer;
  element.has_negative_zero = facts.has_negative_zero;
  element.negative_extra = facts.negative_extra;
  return element;
}

// Whether the facts describe a format that the kernels can hold: a byte, and the arithmetic below.
MX_INLINE bool IsElement(const ElementFacts& facts) {
  const bool widths = facts.exponent_bits >= 1 && facts.exponent_bits <= 7 &&
                      facts.mantissa_bits >= 1 && facts.mantissa_bits <= 7 &&
                      facts.exponent_bits + facts.mantissa_bits <= 7;
  return widths && facts.bias >= -8 && facts.bias <= 24 && facts.num_reserved_codes >= 0 &&
         facts.num_reserved_codes <= 1 << facts.mantissa_bits;
}

// 2^exponent, for normal results.
MX_INLINE float PowerOfTwo(int32_t exponent) {
  return FloatOf(static_cast<uint32_t>(exponent + 127) << 23);
}

// Value of a finite code of the non-negative half.
MX_INLINE float Magnitude(int32_t half, const ElementFormat& element) {
  const int32_t p = element.mantissa_bits;
  const int32_t field = half >> p;
  const int32_t mantissa = (half & ((1 << p) - 1)) + (field != 0 ? 1 << p : 0);
  const int32_t exponent = (field != 0 ? field - 1 : 0) + element.emin - p;
  return static_cast<float>(mantissa) * PowerOfTwo(exponent);
}

MX_INLINE float MaxOf(const ElementFormat& element) { return Magnitude(element.max_code, element); }
MX_INLINE float SmallestNormal(const ElementFormat& element) { return PowerOfTwo(element.emin); }
MX_INLINE float SmallestSubnormal(const ElementFormat& element) {
  return PowerOfTwo(element.emin - element.mantissa_bits);
}

// Value of any code; bits above the format's width are ignored.
MX_INLINE float Decode(int32_t code, const ElementFormat& element) {
  code &= (element.sign_code << 1) - 1;
  const bool negative = code >= element.sign_code;
  if (element.is_integer) {
    const int32_t value = negative ? code - 2 * element.sign_code : code;
    return static_cast<float>(value) * SmallestSubnormal(element);
  }
  const int32_t half = code & (element.sign_code - 1);
  if (!element.has_negative_zero) {
    if (code == element.nan_code) return FloatOf(kNan);
  } else if (half > element.max_code) {
    if (half != element.inf_code) return FloatOf(kNan);
    return FloatOf(kInf | (negative ? ~kAbs : 0));
  }
  const float magnitude = Magnitude(half, element);
  return negative ? -magnitude : magnitude;
}

enum class Rounding : int32_t { kNearest, kAway, kTowardZero, kStochastic };

// `significand / 2^shift`, rounded; significand < 2^24, shift >= 1.
MX_INLINE uint32_t RoundedShift(uint32_t significand, int32_t shift, Rounding rounding,
                                int32_t num_bits, uint32_t random) {
  // Past 25 dropped bits every significand is below half.
  const int32_t capped = shift < 25 ? shift : 25;
  switch (rounding) {
    case Rounding::kNearest: {
      const uint32_t odd = (significand >> capped) & 1;
      return (significand + ((1u << (capped - 1)) - 1) + odd) >> capped;
    }
    case Rounding::kAway:
      return (significand + (1u << (capped - 1))) >> capped;
    case Rounding::kTowardZero:
      return significand >> capped;
    case Rounding::kStochastic: {
      const int32_t wide = shift < 31 ? shift : 31;
      const uint32_t kept = significand >> wide;
      const int32_t rest = shift - num_bits;
      const uint32_t leading = (significand - (kept << wide)) >> (rest < 31 ? rest : 31);
      return kept + ((leading + random) >> num_bits);
    }
  }
  return 0;
}

// The saturated code of a float32 pattern, rounded once; NaN becomes the format's NaN, or 0. Without
// branches, so that compilers make vectors of loops over it.
MX_INLINE uint8_t Encode(uint32_t pattern, const ElementFormat& element, Rounding rounding,
                         int32_t num_bits, uint32_t random) {
  const uint32_t magnitude = pattern & kAbs;
  const int32_t sign = static_cast<int32_t>(pattern) >> 31;
  // A subnormal's exponent is far below any element's: what follows makes 0 of it.
  const int32_t above = static_cast<int32_t>(magnitude >> 23) - (127 + element.emin);
  const int32_t shift = 23 - element.mantissa_bits + (above < 0 ? -above : 0);
  const uint32_t significand = magnitude == 0 ? 0 : (magnitude & kMantissa) | kHidden;
  int32_t half = static_cast<int32_t>(RoundedShift(significand, shift, rounding, num_bits, random));
  half += (above > 0 ? above : 0) << element.mantissa_bits;
  const int32_t integer = -element.is_integer, has_nan = -static_cast<int32_t>(element.nan_code >= 0);
  const int32_t top = element.max_code - (sign & -element.negative_extra);
  half = half < top ? half : top;
  const int32_t is_number = -static_cast<int32_t>(magnitude <= kInf);
  half = (half & is_number) | (element.nan_code & has_nan & ~is_number);
  const int32_t has_sign = -static_cast<int32_t>(half > 0) | -element.has_negative_zero | integer;
  const int32_t negative = sign & (is_number | has_nan) & has_sign;
  half = (half ^ (negative & integer)) - (negative & integer);
  return static_cast<uint8_t>(half | (negative & element.sign_code & ~integer));
}

// Constants of rounding to nearest even by adding a magic number.
struct Magic {
  int32_t smallest_field;  // exponent field of the smallest normal
  int32_t add;             // from a value's exponent field to its magic number's
  int32_t shift;           // bits below the code's last
  int32_t offset;          // what the smallest normal's field adds to the code
  int32_t max_code;
  int32_t sign_shift;
  int32_t sign_code;   // 0 for integers
  int32_t integer;     // -1 for integers, else 0
  int32_t extra;       // what a negative code may exceed max_code by
};

MX_INLINE Magic MagicOf(const ElementFormat& element) {
  const int32_t p = element.mantissa_bits;
  Magic magic;
  magic.smallest_field = (element.emin + 127) << 23;
  magic.add = (23 - p) << 23;
  magic.shift = 23 - p;
  magic.offset = (element.emin + 127) << p;
  magic.max_code = element.max_code;
  magic.sign_shift = 32 - element.bits;
  magic.sign_code = element.is_integer ? 0 : element.sign_code;
  magic.integer = element.is_integer ? -1 : 0;
  magic.extra = element.negative_extra ? -1 : 0;
  return magic;
}

// The sum's last bit is the code's: the addition itself rounds to nearest even. What a carry or the
// leading bit adds to the sum's pattern is what it adds to the code's exponent.
MX_INLINE int32_t HalfOf(float magnitude, const Magic& magic) {
  const int32_t field = static_cast<int32_t>(BitsOf(magnitude) & kInf);
  const int32_t floor = field > magic.smallest_field ? field : magic.smallest_field;
  const uint32_t number = static_cast<uint32_t>(floor) + static_cast<uint32_t>(magic.add);
  const uint32_t counted = BitsOf(magnitude + FloatOf(number)) - number;
  const uint32_t exponent = static_cast<uint32_t>(floor >> magic.shift);
  return static_cast<int32_t>(counted + exponent - static_cast<uint32_t>(magic.offset));
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_ELEMENT_CODEC_H_
