// The matmul kernels in AVX-512.
#include "common/macros.h"

#if MX_X86
#define MX_TABLE kMatmulAvx512
#define MX_TYPES(X) X(kFloat32)
#define MX_CODE_TYPES(X) X(kFloat32)
#define MX_HAS_VNNI 0
#define MX_HAS_BF16 0
#include "cpu/matmul_avx512.inc"
#endif
