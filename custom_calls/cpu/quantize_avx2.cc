// Quantizing in plain C++, compiled for AVX2.
#include "cpu/quantize.h"

#if MX_X86
namespace mx {
namespace {
#include "cpu/quantize_body.inc"
#include "cpu/quantize_amax_body.inc"
#include "cpu/squares_body.inc"
#include "cpu/quantize_squares_body.inc"
#include "cpu/quantize_both_body.inc"
}  // namespace

const QuantizeKernels kQuantizeAvx2 = {Rows, Columns, Squares, Both<Rows, Columns>, Amax};

}  // namespace mx
#endif
