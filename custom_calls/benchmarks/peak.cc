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
// Twelve instructions that do not wait for each other, on registers "x", "y" or "z".
#define MX_ONE(name, of, register) name " %%" of "mm13,%%" of "mm14,%%" of "mm" register "\n"
#define MX_SIX(name, of, a, b, c, d, e, f)                                                 \
  MX_ONE(name, of, a) MX_ONE(name, of, b) MX_ONE(name, of, c) MX_ONE(name, of, d)          \
  MX_ONE(name, of, e) MX_ONE(name, of, f)
#define MX_LOOP(name, of)                                                                         \
  asm volatile(                                                                                   \
      "vpxor %%xmm13,%%xmm13,%%xmm13\nvpxor %%xmm14,%%xmm14,%%xmm14\n1:\n"                        \
      MX_SIX(name, of, "0", "1", "2", "3", "4", "5") MX_SIX(name, of, "6", "7", "8", "9", "10", "11") \
      "dec %0\njnz 1b\n"                                                                          \
      : "+r"(rounds)                                                                              \
      :                                                                                           \
      : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",  \
        "xmm11", "xmm13", "xmm14", "cc")
#endif

// Runs 12 * rounds instructions of a set that this machine has.
ffi::Error Peak(ffi::Result<ffi::Buffer<ffi::S32>> out, std::string_view instruction,
                int64_t rounds) {
  const auto runs = [&](const char* name, Isa isa) {
    return instruction == name && HasIsa(isa) && rounds >= 1;
  };
#if MX_X86
  if (runs("fma256", kAvx2)) MX_LOOP("vfmadd231ps", "y");
  else if (runs("maddubs256", kAvx2)) MX_LOOP("vpmaddubsw", "y");
  else if (runs("vnni256", kAvx2Vnni)) MX_LOOP("%{vex%} vpdpbusd", "y");
  else if (runs("fma", kAvx512)) MX_LOOP("vfmadd231ps", "z");
  else if (runs("vnni", kAvx512Vnni)) MX_LOOP("vpdpbusd", "z");
  else if (runs("bf16", kAvx512Bf16)) MX_LOOP("vdpbf16ps", "z");
  else
#endif
    return InvalidArgument("mx_jax peak: needs an instruction that this machine has, and rounds ",
                           ">= 1, got instruction='", instruction, "', rounds=", rounds, " on ",
                           IsaName(DetectedIsa()));
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
