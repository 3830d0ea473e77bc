// What the handlers that decode have in common: the kernels, a plan of what codes mean, and their
// operands, checked: codes, scales and perhaps a tensor scale.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_

#include <cstdint>
#include <cstring>
#include <string_view>

#include "casts/attributes.h"
#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/element_codec.h"
#include "common/macros.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

// The kernels of the instruction set that runs.
inline const DequantizeKernels& ChosenDequantizeKernels() {
  static const DequantizeKernels* const kKernels[kNumIsas] = MX_KERNELS(kDequantize);
  return Pick(kKernels);
}

// Element and scale of a plan, and the value of every code; see mx_jax.backends.cpu_ffi.casts.
inline xla::ffi::Error ReadFormat(const char* operation, const xla::ffi::Dictionary& attributes,
                                  DequantizePlan* plan) {
  xla::ffi::Span<const int32_t> element, scale_element;
  std::string_view kind_name;
  ElementFormat of_elements{}, of_scales{};
  ScaleFormatKind kind{};
  MX_RETURN_IF_ERROR(ReadAttribute(operation, attributes, "element", &element));
  MX_RETURN_IF_ERROR(ReadAttribute(operation, attributes, "kind", &kind_name));
  MX_RETURN_IF_ERROR(ReadAttribute(operation, attributes, "scale_element", &scale_element));
  MX_RETURN_IF_ERROR(ParseElement(operation, "element", element, &of_elements));
  if (!FindName(kScaleKindNames, kind_name, &kind)) {
    return InvalidArgument("mx_jax ", operation, ": unknown kind='", kind_name, "' of scales");
  }
  if (kind == ScaleFormatKind::kElement) {
    MX_RETURN_IF_ERROR(ParseElement(operation, "scale_element", scale_element, &of_scales));
  }
  SetFormat(of_elements, kind, of_scales, plan);
  return xla::ffi::Error::Success();
}

inline bool HasByteScales(const DequantizePlan& plan) {
  return plan.kind == ScaleFormatKind::kExponent || plan.kind == ScaleFormatKind::kElement;
}

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

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_
