// What the handlers that decode have in common: a plan of what codes mean, and the kernels.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_

#include <cstdint>
#include <cstring>
#include <string_view>

#include "casts/attributes.h"
#include "casts/dequantize.h"
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
  MX_RETURN_IF_ERROR(ParseKind(operation, kind_name, &kind));
  if (kind == ScaleFormatKind::kElement) {
    MX_RETURN_IF_ERROR(ParseElement(operation, "scale_element", scale_element, &of_scales));
  }
  SetFormat(of_elements, kind, of_scales, plan);
  return xla::ffi::Error::Success();
}

inline bool HasByteScales(const DequantizePlan& plan) {
  return plan.kind == ScaleFormatKind::kExponent || plan.kind == ScaleFormatKind::kElement;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DECODING_H_
