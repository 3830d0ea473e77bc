// A bound for benchmarks: what a core multiplies and adds when nothing else holds it up.
#include <cstdint>
#include <string_view>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

#if MX_X86
// Twelve instructions that do not wait for each other, on the widest registers.
#define MX_ONE(name, register) name " %%zmm13,%%zmm14,%%zmm" register "\n"
#define MX_TWELVE(name)                                                                           \
  MX_ONE(name, "0") MX_ONE(name, "1") MX_ONE(name, "2") MX_ONE(name, "3") MX_ONE(name, "4")       \
  MX_ONE(name, "5") MX_ONE(name, "6") MX_ONE(name, "7") MX_ONE(name, "8") MX_ONE(name, "9")       \
  MX_ONE(name, "10") MX_ONE(name, "11")
#define MX_LOOP(name, count)                                                                      \
  asm volatile(                                                                                   \
      "vpxord %%zmm13,%%zmm13,%%zmm13\nvpxord %%zmm14,%%zmm14,%%zmm14\n1:\n" MX_TWELVE(name)      \
      "dec %0\njnz 1b\n"                                                                          \
      : "+r"(count)                                                                               \
      :                                                                                           \
      : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",  \
        "xmm11", "xmm13", "xmm14", "cc")
#endif

// Runs 12 * rounds instructions: 16 products each for "fma", 32 for "bf16", 64 for "vnni".
ffi::Error Peak(ffi::Result<ffi::Buffer<ffi::S32>> out, std::string_view instruction,
                int64_t rounds) {
  const bool fma = instruction == "fma", bf16 = instruction == "bf16", vnni = instruction == "vnni";
  const Isa needed = fma ? kAvx512 : vnni ? kAvx512Vnni : kAvx512Bf16;
  if ((!fma && !bf16 && !vnni) || DetectedIsa() < needed || rounds < 1) {
    return InvalidArgument("mx_jax peak: needs instruction='fma', 'vnni' or 'bf16', which this ",
                           "machine has, and rounds >= 1, got instruction='", instruction,
                           "', rounds=", rounds, " on ", IsaName(DetectedIsa()));
  }
#if MX_X86
  if (fma) MX_LOOP("vfmadd231ps", rounds);
  if (vnni) MX_LOOP("vpdpbusd", rounds);
  if (bf16) MX_LOOP("vdpbf16ps", rounds);
#endif
  for (size_t i = 0; i < out->element_count(); ++i) out->typed_data()[i] = 0;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxPeak, mx::Peak,
                              xla::ffi::Ffi::Bind()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<std::string_view>("instruction")
                                  .Attr<int64_t>("rounds"));
