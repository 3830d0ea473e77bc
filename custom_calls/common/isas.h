// The instruction sets of this processor's family, in ascending order: a machine that has one has all
// before it, but for avx2_vnni, which some with AVX-512 lack (dispatch.h's HasIsa). This is the one
// list in C++; each set's flags, and what is compiled for it, are in CMakeLists.txt and BUILD.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_ISAS_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_ISAS_H_

#include "common/macros.h"

// X(name, enumerator): the name is that of a namespace, of MX_TARGET, and of MX_JAX_CPU_ISA.
// avx512_bf16 means VBMI too.
#if MX_ARM64
#define MX_ISAS(X)         \
  X(portable, kPortable)   \
  X(dotprod, kDotprod)
#else
#define MX_ISAS(X)             \
  X(portable, kPortable)       \
  X(avx2, kAvx2)               \
  X(avx2_vnni, kAvx2Vnni)      \
  X(avx512, kAvx512)           \
  X(avx512_vnni, kAvx512Vnni)  \
  X(avx512_bf16, kAvx512Bf16)
#endif

// A table of kernels called `name` in the namespaces of the sets that are compiled for this processor:
// its declarations, and pointers to each in braces. Products have all sets, casts and attention three
// of x86-64.
#define MX_DECLARE_IN(isa, Kernels, name) \
  namespace isa {                         \
  extern const Kernels name;              \
  }
#if MX_X86
#define MX_DECLARE_KERNELS(Kernels, name)    \
  MX_DECLARE_IN(portable, Kernels, name)     \
  MX_DECLARE_IN(avx2, Kernels, name)         \
  MX_DECLARE_IN(avx512, Kernels, name)
#define MX_DECLARE_PRODUCT_KERNELS(Kernels, name) \
  MX_DECLARE_KERNELS(Kernels, name)               \
  MX_DECLARE_IN(avx2_vnni, Kernels, name)         \
  MX_DECLARE_IN(avx512_vnni, Kernels, name)       \
  MX_DECLARE_IN(avx512_bf16, Kernels, name)
#define MX_KERNELS(name) {&portable::name, &avx2::name, &avx2::name, &avx512::name}
#define MX_PRODUCT_KERNELS(name)                                                            \
  {&portable::name, &avx2::name,        &avx2_vnni::name,                                   \
   &avx512::name,   &avx512_vnni::name, &avx512_bf16::name}
#else
#define MX_DECLARE_KERNELS(Kernels, name) MX_DECLARE_IN(portable, Kernels, name)
#define MX_KERNELS(name) {&portable::name}
#if MX_ARM64
#define MX_DECLARE_PRODUCT_KERNELS(Kernels, name) \
  MX_DECLARE_KERNELS(Kernels, name)               \
  MX_DECLARE_IN(dotprod, Kernels, name)
#define MX_PRODUCT_KERNELS(name) {&portable::name, &dotprod::name}
#else
#define MX_DECLARE_PRODUCT_KERNELS(Kernels, name) MX_DECLARE_KERNELS(Kernels, name)
#define MX_PRODUCT_KERNELS(name) MX_KERNELS(name)
#endif
#endif

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_ISAS_H_
