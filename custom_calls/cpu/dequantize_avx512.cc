// Dequantizing with AVX-512. A code's magnitude, moved to the top of a half's mantissa, is a half
// that differs from its value by a power of two, subnormal or not; converting it to float32 is exact.
#include "cpu/dequantize.h"

#if MX_X86
#include <immintrin.h>

namespace mx {
namespace {
#include "cpu/dequantize_body.inc"
#include "cpu/dequantize_avx512.inc"
#include "cpu/squares_body.inc"
#include "cpu/dequantize_squares_body.inc"
}  // namespace

const DequantizeKernels kDequantizeAvx512 = {Avx512Rows, Avx512Columns, Squares<Avx512Rows>};

}  // namespace mx
#endif
