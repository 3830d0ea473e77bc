// Dequantizing in plain C++, compiled for AVX2.
#include "cpu/dequantize.h"

#if MX_X86
namespace mx {
namespace {
#include "cpu/dequantize_body.inc"
#include "cpu/squares_body.inc"
#include "cpu/dequantize_squares_body.inc"
}  // namespace

const DequantizeKernels kDequantizeAvx2 = {Rows, Columns, Squares<Rows>};

}  // namespace mx
#endif
