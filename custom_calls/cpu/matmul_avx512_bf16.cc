// The matmul kernels in AVX-512 with VNNI and BF16.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx512Bf16
#define MX_HAS_VNNI 1
#define MX_HAS_BF16 1
#include "cpu/matmul_avx512.inc"
#endif
