// Errors of handlers: operation, violated rule, actual values.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_

#include <cstdint>
#include <sstream>
#include <string>

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

}  // namespace mx

// Returns the error of an expression, if it has one.
#define MX_RETURN_IF_ERROR(expression)                             \
  do {                                                             \
    if (xla::ffi::Error error = (expression); error.failure()) {   \
      return error;                                                \
    }                                                              \
  } while (false)

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_CHECKS_H_
