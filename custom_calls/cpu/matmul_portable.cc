// The matmul kernels in plain C++.
#define MX_TABLE kMatmulPortable
#define MX_HAS_AVX2 0
#include "cpu/matmul_portable.inc"
