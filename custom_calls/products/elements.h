// The elements that products take, a row each. Included by kernels: see target.h.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_ELEMENTS_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_ELEMENTS_H_

#include <stdint.h>

#include "common/element_codec.h"

namespace mx {

// Enumerator, name in a handler's attributes, facts in the order of ElementFacts. Floats of 8 bits
// come first, INT8 last.
#define MX_ELEMENTS(X)                            \
  X(kE4M3, "e4m3", {4, 3, 7, 1, 0, 0, 1, 0})      \
  X(kE5M2, "e5m2", {5, 2, 15, 4, 1, 0, 1, 0})     \
  X(kE2M3, "e2m3", {2, 3, 1, 0, 0, 0, 1, 0})      \
  X(kE3M2, "e3m2", {3, 2, 3, 0, 0, 0, 1, 0})      \
  X(kE2M1, "e2m1", {2, 1, 1, 0, 0, 0, 1, 0})      \
  X(kElementInt8, "int8", {1, 6, 1, 0, 0, 1, 0, 0})
#define MX_ENUMERATOR(element, name, ...) element,
#define MX_NAME(element, name, ...) name,
#define MX_FACTS(element, name, ...) __VA_ARGS__,

enum Element : int32_t {
  MX_ELEMENTS(MX_ENUMERATOR)
  kElementFloat32,
  kElementBf16,
  kElementF16
};
constexpr int kNumElements = kElementF16 + 1;
constexpr const char* kElementNames[] = {MX_ELEMENTS(MX_NAME)};
constexpr ElementFacts kElementFacts[] = {MX_ELEMENTS(MX_FACTS)};

#undef MX_ENUMERATOR
#undef MX_NAME
#undef MX_FACTS

MX_INLINE constexpr int64_t ElementBytes(Element element) {
  return element <= kElementInt8 ? 1 : element == kElementFloat32 ? 4 : 2;
}

// Of a code, without what a byte has beyond it.
MX_INLINE constexpr int ElementBits(Element element) {
  if (element > kElementInt8) return static_cast<int>(8 * ElementBytes(element));
  return 1 + kElementFacts[element].exponent_bits + kElementFacts[element].mantissa_bits;
}

// A code's value times 2^UnitShift is an integer, of at most LargestInteger where nothing is reserved.
MX_INLINE constexpr int UnitShift(Element element) {
  return kElementFacts[element].mantissa_bits + kElementFacts[element].bias - 1;
}
MX_INLINE constexpr int64_t LargestInteger(Element element) {
  const ElementFacts& facts = kElementFacts[element];
  const int64_t significand = (int64_t{2} << facts.mantissa_bits) - 1;
  return significand << ((1 << facts.exponent_bits) - 2);
}

// Whether words of integers hold all values, and the sums of a block no rounding.
MX_INLINE constexpr bool FitsInt8(Element element) {
  return element <= kElementInt8 && LargestInteger(element) <= 127;
}
MX_INLINE constexpr bool FitsInt16(Element element) {
  return element <= kElementInt8 && LargestInteger(element) <= 4095;
}

// Calls `run` with the constant that an element of codes is.
template <Element kValue>
struct ElementConstant {
  static constexpr Element value = kValue;
};
template <typename Run>
MX_INLINE void ByElement(Element element, const Run& run) {
#define MX_CASE(value, ...) \
  case value:               \
    return run(ElementConstant<value>());
  switch (element) {
    MX_ELEMENTS(MX_CASE)
    default:
      return;
  }
#undef MX_CASE
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_ELEMENTS_H_
