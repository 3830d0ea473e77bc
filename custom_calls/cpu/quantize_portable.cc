// Quantizing in plain C++, for any compiler and machine.
#include "cpu/quantize.h"

namespace mx {
namespace {
#include "cpu/quantize_body.inc"
#include "cpu/quantize_both_body.inc"
}  // namespace

const QuantizeKernels kQuantizePortable = {Rows, Columns, Both<Rows, Columns>};

}  // namespace mx
