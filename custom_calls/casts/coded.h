// Operands of the handlers that decode, checked: codes, scales and perhaps a tensor scale.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_CODED_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_CODED_H_

#include <cstdint>

#include "casts/attributes.h"
#include "casts/decoding.h"
#include "casts/geometry.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

inline xla::ffi::Error CheckCoded(const char* operation, const xla::ffi::AnyBuffer& codes,
                                  const xla::ffi::AnyBuffer& scales, const Dimensions& shape,
                                  const Geometry& geometry, const DequantizePlan& plan) {
  if (codes.element_type() != xla::ffi::U8 || !SameShape(codes.dimensions(), shape)) {
    return InvalidArgument("mx_jax ", operation, ": codes must be uint8 of shape ", Shape(shape),
                           ", got codes.shape=", Shape(codes.dimensions()));
  }
  const bool bytes = HasByteScales(plan);
  const Dimensions scales_shape = ScalesShape(shape, geometry);
  if (scales.element_type() != (bytes ? xla::ffi::U8 : xla::ffi::F32) ||
      !SameShape(scales.dimensions(), scales_shape)) {
    return InvalidArgument("mx_jax ", operation, ": scales must be ", bytes ? "uint8" : "float32",
                           " of shape ", Shape(scales_shape), " for values of shape ", Shape(shape),
                           ", got scales.shape=", Shape(scales.dimensions()));
  }
  return xla::ffi::Error::Success();
}

// The plan reads values of a shape from codes, scales and what follows them; the attributes are
// those of mx_jax.backends.cpu_ffi.casts. What it writes, the caller says.
inline xla::ffi::Error ReadCoded(const char* operation, const xla::ffi::Dictionary& attributes,
                                 const Dimensions& shape, const xla::ffi::AnyBuffer& codes,
                                 const xla::ffi::AnyBuffer& scales,
                                 const xla::ffi::RemainingArgs& rest, Geometry* geometry,
                                 DequantizePlan* plan) {
  xla::ffi::Span<const int64_t> blocks;
  bool has_tensor_scale = false;
  MX_RETURN_IF_ERROR(ReadAttribute(operation, attributes, "blocks", &blocks));
  MX_RETURN_IF_ERROR(ReadAttribute(operation, attributes, "has_tensor_scale", &has_tensor_scale));
  MX_RETURN_IF_ERROR(ReadFormat(operation, attributes, plan));
  MX_RETURN_IF_ERROR(FindGeometry(operation, shape, blocks, geometry));
  MX_RETURN_IF_ERROR(CheckCoded(operation, codes, scales, shape, *geometry, *plan));
  if (rest.size() != (has_tensor_scale ? 1 : 0)) {
    return InvalidArgument("mx_jax ", operation, ": needs ", has_tensor_scale ? 1 : 0,
                           " operands after scales for has_tensor_scale=", has_tensor_scale,
                           ", got ", rest.size());
  }
  if (has_tensor_scale) {
    MX_RETURN_IF_ERROR(TakeTensorScale(operation, rest, 0, geometry->outer, &plan->tensor_scales,
                                       &plan->num_tensor_scales));
  }
  plan->codes = static_cast<const uint8_t*>(codes.untyped_data());
  plan->scales = scales.untyped_data();
  FillPlan(*geometry, plan);
  return xla::ffi::Error::Success();
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_CODED_H_
