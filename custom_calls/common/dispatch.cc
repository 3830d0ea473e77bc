#include "common/dispatch.h"

#include <cstdlib>
#include <cstring>

#include "common/macros.h"

#if MX_X86
#include <cpuid.h>
#elif MX_ARM64 && defined(__linux__)
#include <sys/auxv.h>
#elif MX_ARM64 && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace mx {
namespace {

#define MX_NAME(name, enumerator) #name,
constexpr const char* kNames[kNumIsas] = {MX_ISAS(MX_NAME)};
#undef MX_NAME

#if MX_ARM64
bool HasDotprod() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) >> 20 & 1) != 0;  // HWCAP_ASIMDDP, which older headers lack
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}
#endif

#if MX_X86
// AVX-VNNI, which older compilers have no name for.
bool HasAvxVnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

Isa Detect() {
#if MX_ARM64
  return HasDotprod() ? kDotprod : kPortable;
#elif MX_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return HasAvxVnni() ? kAvx2Vnni : kAvx2;
  if (!__builtin_cpu_supports("avx512vnni")) return kAvx512;
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  return bf16 ? kAvx512Bf16 : kAvx512Vnni;
#else
  return kPortable;
#endif
}

bool HasIsa(Isa isa, Isa detected) {
#if MX_X86
  if (isa == kAvx2Vnni && !HasAvxVnni()) return false;
#endif
  return isa <= detected;
}

struct Choice {
  Isa detected;
  Isa current;
  bool valid;
};

Choice Choose() {
  Choice choice{Detect(), kPortable, true};
  choice.current = choice.detected;
  const char* wanted = std::getenv("MX_JAX_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return choice;
  for (int isa = 0; isa <= choice.detected; ++isa) {
    if (std::strcmp(wanted, kNames[isa]) == 0 && HasIsa(static_cast<Isa>(isa), choice.detected)) {
      choice.current = static_cast<Isa>(isa);
      return choice;
    }
  }
  choice.valid = false;
  return choice;
}

const Choice& TheChoice() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

const char* IsaName(Isa isa) { return kNames[isa]; }
Isa DetectedIsa() { return TheChoice().detected; }
bool HasIsa(Isa isa) { return HasIsa(isa, DetectedIsa()); }
Isa CurrentIsa() { return TheChoice().current; }
bool HasVbmi() {
#if MX_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}
bool IsaOverrideIsValid() { return TheChoice().valid; }

}  // namespace mx
