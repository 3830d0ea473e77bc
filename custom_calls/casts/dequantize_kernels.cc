// The dequantizing kernels, compiled for each instruction set: see common/target.h.
#include "casts/dequantize.h"
#include "casts/dequantize_plain-inl.h"
#include "common/target.h"
#if MX_RANK >= MX_RANK_avx512
#include "casts/dequantize_avx512-inl.h"
#endif

namespace mx::MX_TARGET {

#if MX_RANK >= MX_RANK_avx512
const DequantizeKernels kDequantize = {Avx512Rows, Avx512Columns, Squares<Avx512Rows>};
#else
const DequantizeKernels kDequantize = {Rows, Columns, Squares<Rows>};
#endif

}  // namespace mx::MX_TARGET
