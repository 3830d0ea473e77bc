// Tiles to the output.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_INL_H_

#include "common/float_types.h"
#include "products/kernels.h"

namespace mx::MX_TARGET {
namespace {

template <class Out>
MX_INLINE void StoreAs(const float* tile, int rows, int columns, float alpha, Out* out,
                       int64_t out_stride) {
  for (int i = 0; i < rows; ++i, tile += kTileColumns, out += out_stride) {
    for (int j = 0; j < columns; ++j) StoreValue(out + j, tile[j] * alpha);
  }
}

void Store(const float* tile, int rows, int columns, float alpha, OutType type, void* out,
           int64_t out_stride) {
  if (type == kOutFloat32) StoreAs(tile, rows, columns, alpha, (float*)out, out_stride);
  else if (type == kOutBf16) StoreAs(tile, rows, columns, alpha, (Bf16*)out, out_stride);
  else StoreAs(tile, rows, columns, alpha, (F16*)out, out_stride);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_STORE_INL_H_
