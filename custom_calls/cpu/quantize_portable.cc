// Quantizing in plain C++, for any compiler and machine.
#include "cpu/quantize.h"

namespace mx {
namespace {
#include "cpu/quantize_body.inc"
#include "cpu/quantize_amax_body.inc"
#include "cpu/squares_body.inc"
#include "cpu/quantize_squares_body.inc"
#include "cpu/quantize_both_body.inc"
}  // namespace

const QuantizeKernels kQuantizePortable = {Rows, Columns, Squares, Both<Rows, Columns>, Amax};

}  // namespace mx
