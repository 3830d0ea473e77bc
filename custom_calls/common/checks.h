// Errors of handlers: operation, violated rule, actual values.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>

#include "common/float_types.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

template <class Numbers>
std::string Shape(const Numbers& dimensions) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < dimensions.size(); ++i) text << (i == 0 ? "" : ", ") << dimensions[i];
  text << ')';
  return text.str();
}

// Joins its arguments to the message of an INVALID_ARGUMENT error.
template <class... Parts>
xla::ffi::Error InvalidArgument(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, text.str());
}

template <class Left, class Right>
bool SameShape(const Left& left, const Right& right) {
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i] != right[i]) return false;
  }
  return true;
}

// The enumerator whose place is that of a name; false where it is not among the names.
template <class Enum, size_t kCount>
bool FindName(const char* const (&names)[kCount], std::string_view name, Enum* value) {
  const char* const* place = std::find(std::begin(names), std::end(names), name);
  *value = static_cast<Enum>(place - std::begin(names));
  return place != std::end(names);
}

// The type of an array of values; `what` says in an error which operation or array needs it.
template <class... What>
xla::ffi::Error ParseFloatType(const xla::ffi::AnyBuffer& x, FloatType* type, const What&... what) {
  switch (x.element_type()) {
    case xla::ffi::F32:
      *type = FloatType::kF32;
      return xla::ffi::Error::Success();
    case xla::ffi::BF16:
      *type = FloatType::kBf16;
      return xla::ffi::Error::Success();
    case xla::ffi::F16:
      *type = FloatType::kF16;
      return xla::ffi::Error::Success();
    default:
      return InvalidArgument("mx_jax ", what..., " needs float32, bfloat16 or float16, got an array ",
                             "of shape ", Shape(x.dimensions()), " of another dtype");
  }
}

}  // namespace mx

// Returns the error of an expression, if it has one.
#define MX_RETURN_IF_ERROR(expression)                             \
  do {                                                             \
    if (xla::ffi::Error error = (expression); error.failure()) {   \
      return error;                                                \
    }                                                              \
  } while (false)

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_
