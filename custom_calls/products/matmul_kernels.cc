// The kernels of products, compiled for each instruction set: see common/target.h.
#include "common/float_types.h"
#include "common/target.h"
#include "products/kernels.h"
#if MX_RANK >= MX_RANK_avx512
#include "products/keep_avx512-inl.h"
#else
#include "products/kernels_plain-inl.h"
#endif
#if (MX_RANK >= MX_RANK_avx2 && MX_RANK < MX_RANK_avx512) || defined(__aarch64__)
#include "products/codes_rows-inl.h"
#endif
#include "products/pack_codes-inl.h"

namespace mx::MX_TARGET {
namespace {

// Rounds alpha * tile[rows][columns] to the output's type, once.
void Store(const float* tile, int rows, int columns, float alpha, FloatType type, void* out,
           int64_t out_stride) {
  ByType(type, [&](auto of) {
    auto* to = static_cast<decltype(of)*>(out);
    for (int i = 0; i < rows; ++i, tile += kTileColumns, to += out_stride) {
      for (int j = 0; j < columns; ++j) StoreValue(to + j, tile[j] * alpha);
    }
  });
}

}  // namespace

#if MX_RANK >= MX_RANK_avx512_vnni
namespace {
const PanelKernels kInt8Panels = {PackLhs<kInt8>,  PackRhs<kInt8>,       PackFew<kInt8>,
                                  Multiply<kInt8>, MultiplyCodes<kInt8>, MultiplyKeeping<kInt8>};
#if MX_RANK >= MX_RANK_avx512_bf16
const PanelKernels kBf16Panels = {PackLhs<kBf16>,  PackRhs<kBf16>,       PackFew<kBf16>,
                                  Multiply<kBf16>, MultiplyCodes<kBf16>, MultiplyKeeping<kBf16>};
const PanelKernels *const kShort = nullptr, *const kWords = &kBf16Panels;
#else
const PanelKernels kInt16Panels = {PackLhs<kInt16>,  PackRhs<kInt16>, nullptr,
                                   Multiply<kInt16>, nullptr,         nullptr};
const PanelKernels *const kShort = &kInt16Panels, *const kWords = nullptr;
#endif
}  // namespace
const MatmulKernels kMatmul = {
    {&kInt8Panels, kShort, kWords, &avx512::kFloat32Panels}, PackCodes, Store};
#elif MX_RANK == MX_RANK_avx512
const PanelKernels kFloat32Panels = {PackLhs<kFloat32>,  PackRhs<kFloat32>,       PackFew<kFloat32>,
                                     Multiply<kFloat32>, MultiplyCodes<kFloat32>, nullptr,
                                     16, kE5M2 + 1};
const MatmulKernels kMatmul = {{nullptr, nullptr, nullptr, &kFloat32Panels}, PackCodes, Store};
#elif MX_RANK >= MX_RANK_avx2 || defined(__aarch64__)
namespace {
#if MX_RANK >= MX_RANK_avx2
constexpr int64_t kAnew = 8;
const PanelKernels kInt16Panels = {PackLhs<kInt16>,  PackRhs<kInt16>,       PackFew<kInt16>,
                                   Multiply<kInt16>, MultiplyCodes<kInt16>, nullptr, 8, 0, kAnew, false};
const PanelKernels* const kShort = &kInt16Panels;
#else
constexpr int64_t kAnew = 60;
const PanelKernels* const kShort = nullptr;
#endif
constexpr bool kX86 = MX_RANK >= MX_RANK_avx2;
#if MX_RANK >= MX_RANK_avx2 || defined(__ARM_FEATURE_DOTPROD)
const PanelKernels kInt8Panels = {PackLhs<kInt8>,  PackRhs<kInt8>,       PackFew<kInt8>,
                                  Multiply<kInt8>, MultiplyCodes<kInt8>, nullptr,
                                  8, 0, kAnew, !kX86, MX_RANK == MX_RANK_avx2};
const PanelKernels* const kBytes = &kInt8Panels;
#else
const PanelKernels* const kBytes = nullptr;
#endif
const PanelKernels kFloat32Panels = {PackLhs<kFloat32>,  PackRhs<kFloat32>,       PackFew<kFloat32>,
                                     Multiply<kFloat32>, MultiplyCodes<kFloat32>, nullptr,
                                     8, kX86 ? kE3M2 + 1 : 0, kAnew, !kX86};
}  // namespace
const MatmulKernels kMatmul = {
    {kBytes, kShort, nullptr, &kFloat32Panels}, PackCodes, Store};
#else
namespace {
const PanelKernels kFloat32Panels = {PackLhs<kFloat32>,  PackRhs<kFloat32>, PackFew<kFloat32>,
                                     Multiply<kFloat32>, nullptr,           nullptr};
}  // namespace
const MatmulKernels kMatmul = {
    {nullptr, nullptr, nullptr, &kFloat32Panels}, PackCodes, Store};
#endif

}  // namespace mx::MX_TARGET
