// The formats of mx_jax.formats, for tests of every one of them.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_

#include "products/elements.h"

namespace mx_test {

struct Named {
  const char* name;
  mx::ElementFacts facts;
};

// exponent bits, mantissa bits, bias, reserved codes, Inf, integer, negative zero, code below -max.
#define MX_NAMED(element, name, ...) {name, __VA_ARGS__},
inline const Named kFormats[] = {
    MX_ELEMENTS(MX_NAMED){"int8_full", {1, 6, 1, 0, 0, 1, 0, 1}},
    {"e4m3fnuz", {4, 3, 8, 0, 0, 0, 0, 0}},
    {"e5m2fnuz", {5, 2, 16, 0, 0, 0, 0, 0}},
};
#undef MX_NAMED

}  // namespace mx_test

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_
