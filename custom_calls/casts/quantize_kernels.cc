// The quantizing kernels, compiled for each instruction set: see common/target.h.
#include "casts/quantize.h"
#include "common/target.h"

#if MX_RANK >= MX_RANK_avx512_vbmi
#include "casts/word_casts_vbmi-inl.h"
#else
#include "casts/quantize_squares-inl.h"
#include "casts/strips-inl.h"
#if MX_RANK >= MX_RANK_avx512
#include "casts/columns_avx512-inl.h"
#include "casts/strips_avx512-inl.h"
#endif
#endif

namespace mx::MX_TARGET {
namespace {

#if MX_RANK >= MX_RANK_avx512_vbmi
void VbmiSquares(const QuantizePlan& plan, int64_t begin, int64_t end) {
  avx512::kQuantize.squares(plan, begin, end);
}

void Avx512Amax(const QuantizePlan& plan, int64_t begin, int64_t end, int32_t* amax) {
  avx512::kQuantize.amax(plan, begin, end, amax);
}
#elif MX_RANK >= MX_RANK_avx512
void Avx512Rows(const QuantizePlan& plan, int64_t begin, int64_t end) {
  (RowsSuitVectors(plan) ? VectorRows : Rows)(plan, begin, end);
}

void Avx512Both(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin, int64_t end) {
  if (!RowsSuitVectors(rows)) return Both<Avx512Rows, Avx512Columns>(rows, columns, begin, end);
  VectorStrips(rows, columns, begin, end, Avx512Rows, Avx512Columns);
}
#endif

}  // namespace

#if MX_RANK >= MX_RANK_avx512_vbmi
const QuantizeKernels kQuantize = {VbmiRows, VbmiColumns, VbmiSquares, VbmiBoth, Avx512Amax};
#elif MX_RANK >= MX_RANK_avx512
const QuantizeKernels kQuantize = {Avx512Rows, Avx512Columns, Avx512Squares, Avx512Both, Amax};
#else
const QuantizeKernels kQuantize = {Rows, Columns, Squares, Both<Rows, Columns>, Amax};
#endif

}  // namespace mx::MX_TARGET
