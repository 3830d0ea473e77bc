// The formats of mx_jax.formats, for tests of every one of them.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_

#include "common/element_codec.h"

namespace mx_test {

struct Named {
  const char* name;
  mx::ElementFacts facts;
};

// exponent bits, mantissa bits, bias, reserved codes, Inf, integer, negative zero, code below -max.
inline const Named kFormats[] = {
    {"e4m3", {4, 3, 7, 1, 0, 0, 1, 0}},     {"e5m2", {5, 2, 15, 4, 1, 0, 1, 0}},
    {"e2m3", {2, 3, 1, 0, 0, 0, 1, 0}},     {"e3m2", {3, 2, 3, 0, 0, 0, 1, 0}},
    {"e2m1", {2, 1, 1, 0, 0, 0, 1, 0}},     {"int8", {1, 6, 1, 0, 0, 1, 0, 0}},
    {"int8_full", {1, 6, 1, 0, 0, 1, 0, 1}}, {"e4m3fnuz", {4, 3, 8, 0, 0, 0, 0, 0}},
    {"e5m2fnuz", {5, 2, 16, 0, 0, 0, 0, 0}},
};

}  // namespace mx_test

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_FORMATS_H_
