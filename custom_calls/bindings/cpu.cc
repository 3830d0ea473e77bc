// The list of everything that the CPU library offers. Each handler is defined, with its operands and
// attributes, beside the code that it runs; adding one is two lines here.
#include "common/library.h"
#include "common/macros.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(MxAttend);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxAttendCodes);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxCastStatistics);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxDequantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxLeastLoss);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxMatmul);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxMatmulPacked);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxPackWeights);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxQuantize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxQuantizeBoth);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxRandomBits);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MxTransform);

namespace {

const mx::Target kTargets[] = {
    {"mx_jax_cpu_attend", reinterpret_cast<void*>(MxAttend)},
    {"mx_jax_cpu_attend_codes", reinterpret_cast<void*>(MxAttendCodes)},
    {"mx_jax_cpu_cast_statistics", reinterpret_cast<void*>(MxCastStatistics)},
    {"mx_jax_cpu_dequantize", reinterpret_cast<void*>(MxDequantize)},
    {"mx_jax_cpu_least_loss", reinterpret_cast<void*>(MxLeastLoss)},
    {"mx_jax_cpu_matmul", reinterpret_cast<void*>(MxMatmul)},
    {"mx_jax_cpu_matmul_packed", reinterpret_cast<void*>(MxMatmulPacked)},
    {"mx_jax_cpu_pack_weights", reinterpret_cast<void*>(MxPackWeights)},
    {"mx_jax_cpu_quantize", reinterpret_cast<void*>(MxQuantize)},
    {"mx_jax_cpu_quantize_both", reinterpret_cast<void*>(MxQuantizeBoth)},
    {"mx_jax_cpu_random_bits", reinterpret_cast<void*>(MxRandomBits)},
    {"mx_jax_cpu_transform", reinterpret_cast<void*>(MxTransform)},
};

}  // namespace

extern "C" MX_EXPORT const mx::Library* mx_jax_cpu_library() {
  static const mx::Library library = mx::Describe(kTargets);
  return &library;
}
