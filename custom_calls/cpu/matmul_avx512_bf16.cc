// The matmul kernels in AVX-512 with VNNI, BF16 and VBMI.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx512Bf16
#define MX_TYPES(X) X(kBf16)
#define MX_CODE_TYPES(X) X(kBf16)
#define MX_LOWER kMatmulAvx512Vnni
#define MX_HAS_VNNI 1
#define MX_HAS_BF16 1
#include "cpu/matmul_avx512.inc"
#endif
