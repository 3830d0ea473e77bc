// The matmul kernels in AVX-512 with VNNI.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx512Vnni
#define MX_HAS_VNNI 1
#define MX_HAS_BF16 0
#include "cpu/matmul_avx512.inc"
#endif
