// The matmul kernels in AVX2 with FMA.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx2
#define MX_HAS_AVX2 1
#include "cpu/matmul_portable.inc"
#endif
