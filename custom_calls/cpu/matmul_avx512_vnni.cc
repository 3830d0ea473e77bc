// The matmul kernels in AVX-512 with VNNI.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx512Vnni
#define MX_TYPES(X) X(kInt8) X(kInt16)
#define MX_CODE_TYPES(X) X(kInt8)
#define MX_LOWER kMatmulAvx512
#define MX_HAS_VNNI 1
#define MX_HAS_BF16 0
#include "cpu/matmul_avx512.inc"
#endif
