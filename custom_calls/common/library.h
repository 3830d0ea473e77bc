// What the library tells Python before anything of it is registered.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_LIBRARY_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_LIBRARY_H_

#include <cstddef>
#include <cstdint>

#include "common/dispatch.h"
#include "xla/ffi/api/c_api.h"

namespace mx {

// Raised whenever a handler's operands or attributes change, so that a stale build is refused.
constexpr int32_t kInterface = 9;

struct Target {
  const char* name;  // as jax.ffi.ffi_call takes it
  void* handler;     // XLA_FFI_Handler*
};

// Read through ctypes by mx_jax/backends/cpu_ffi/library.py: keep the two alike.
struct Library {
  int32_t interface;
  int32_t api_major;  // of the FFI headers that it was built with
  int32_t api_minor;
  int32_t isa_override_is_valid;
  const char* isa;
  const char* detected_isa;
  int64_t num_targets;
  const Target* targets;
};

template <size_t kCount>
Library Describe(const Target (&targets)[kCount]) {
  return {kInterface,
          XLA_FFI_API_MAJOR,
          XLA_FFI_API_MINOR,
          IsaOverrideIsValid() ? 1 : 0,
          IsaName(CurrentIsa()),
          IsaName(DetectedIsa()),
          kCount,
          targets};
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_LIBRARY_H_
