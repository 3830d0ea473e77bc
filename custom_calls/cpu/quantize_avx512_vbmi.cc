// Quantizing with AVX-512 and its byte permutations (VBMI): power-of-two scales take half as many
// instructions; everything else is as in quantize_avx512.cc.
#include "cpu/quantize.h"

#if MX_X86
#include <immintrin.h>

// What has the rest; see quantize_avx512.inc.
#define MX_LOWER kQuantizeAvx512

namespace mx {
namespace {
#include "cpu/quantize_body.inc"
#include "cpu/quantize_avx512.inc"
#include "cpu/quantize_both_body.inc"
#include "cpu/quantize_both_avx512.inc"
#include "cpu/quantize_words_vbmi.inc"

void LowerSquares(const QuantizePlan& plan, int64_t begin, int64_t end) {
  MX_LOWER.squares(plan, begin, end);
}

void LowerAmax(const QuantizePlan& plan, int64_t begin, int64_t end, int32_t* amax) {
  MX_LOWER.amax(plan, begin, end, amax);
}

}  // namespace

const QuantizeKernels kQuantizeAvx512Vbmi = {VbmiRows, VbmiColumns, LowerSquares, VbmiBoth,
                                             LowerAmax};

}  // namespace mx
#endif
