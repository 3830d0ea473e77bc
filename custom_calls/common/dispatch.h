// Which instruction set runs: found once, overridden by the environment variable MX_JAX_CPU_ISA.
#ifndef MX_JAX_CUSTOM_CALLS_COMMON_DISPATCH_H_
#define MX_JAX_CUSTOM_CALLS_COMMON_DISPATCH_H_

#include "common/isas.h"

namespace mx {

#define MX_ENUMERATOR(name, enumerator) enumerator,
enum Isa : int { MX_ISAS(MX_ENUMERATOR) kNumIsas };
#undef MX_ENUMERATOR

// As isas.h has it.
const char* IsaName(Isa isa);

// The best that this machine has.
Isa DetectedIsa();

// Whether this machine has one.
bool HasIsa(Isa isa);

// What runs: the one that MX_JAX_CPU_ISA names, or the detected one where it is unset.
Isa CurrentIsa();

// Whether this machine permutes bytes of AVX-512 vectors (VBMI).
bool HasVbmi();

// Whether MX_JAX_CPU_ISA, if set, names an instruction set that this machine has.
bool IsaOverrideIsValid();

// Kernels of one kind for each instruction set; null where a set has none of its own. `kernels[0]`,
// the portable one, is always there.
template <class Kernels>
const Kernels& Pick(const Kernels* const (&kernels)[kNumIsas]) {
  int isa = CurrentIsa();
  while (kernels[isa] == nullptr) --isa;
  return *kernels[isa];
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_COMMON_DISPATCH_H_
