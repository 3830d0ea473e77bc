// A library of its own, with bounds that benchmarks measure beside kernels: benchmarks/limits.py.
#include "common/library.h"
#include "common/macros.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(MxPeak);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxTraffic);

namespace {

const mx::Target kTargets[] = {
    {"mx_jax_cpu_peak", reinterpret_cast<void*>(MxPeak)},
    {"mx_jax_cpu_traffic", reinterpret_cast<void*>(MxTraffic)},
};

}  // namespace

extern "C" MX_EXPORT const mx::Library* mx_jax_cpu_library() {
  static const mx::Library library = mx::Describe(kTargets);
  return &library;
}
