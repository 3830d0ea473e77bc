// Quantizing with AVX-512 and its byte permutations (VBMI): power-of-two scales take half as many
// instructions; everything else is as in quantize_avx512.cc.
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
#include "cpu/quantize_words_vbmi.inc"
}  // namespace

const QuantizeKernels kQuantizeAvx512Vbmi = {VbmiRows, VbmiColumns, Squares, VbmiBoth, Amax};

}  // namespace mx
#endif
