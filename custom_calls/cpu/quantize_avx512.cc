// Quantizing with AVX-512. Blocks of 16 << n contiguous values are taken sixteen at a time: their
// sixteen largest magnitudes fill one vector, so that scales are computed side by side. Blocks along
// another axis need no such care: every column is a lane. What is left over, and what is rare, goes
// through the plain loops of quantize_body.inc.
#include "cpu/quantize.h"

#if MX_X86
#include <immintrin.h>

namespace mx {
namespace {
#include "cpu/quantize_body.inc"
#include "cpu/quantize_amax_body.inc"
#include "cpu/squares_body.inc"
#include "cpu/quantize_squares_body.inc"
#include "cpu/quantize_avx512.inc"
#include "cpu/quantize_both_body.inc"
#include "cpu/quantize_both_avx512.inc"
}  // namespace

const QuantizeKernels kQuantizeAvx512 = {Avx512Rows, Avx512Columns, Squares, Avx512Both, Amax};

}  // namespace mx
#endif
