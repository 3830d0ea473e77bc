// Dequantizing in plain C++, for any compiler and machine.
#include "cpu/dequantize.h"

namespace mx {
namespace {
#include "cpu/dequantize_body.inc"
#include "cpu/squares_body.inc"
#include "cpu/dequantize_squares_body.inc"
}  // namespace

const DequantizeKernels kDequantizePortable = {Rows, Columns, Squares<Rows>};

}  // namespace mx
