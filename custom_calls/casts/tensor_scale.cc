// The handler that makes tensor scales of the patterns that `amax` found.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/checks.h"
#include "common/float_environment.h"
#include "common/tiny.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// `scales` has the shape of `amax`, with all axes from some on reduced to 1.
bool IsReduced(ffi::Span<const int64_t> amax, ffi::Span<const int64_t> scales) {
  if (amax.size() != scales.size()) return false;
  size_t axis = 0;
  while (axis < amax.size() && amax[axis] == scales[axis]) ++axis;
  while (axis < amax.size() && scales[axis] == 1) ++axis;
  return axis == amax.size();
}

ffi::Error TensorScale(ffi::Buffer<ffi::S32> amax, ffi::Result<ffi::Buffer<ffi::F32>> scales,
                       float largest_value) {
  if (!IsReduced(amax.dimensions(), scales->dimensions())) {
    return InvalidArgument("mx_jax tensor_scale: needs the shape of amax with its last axes ",
                           "reduced to 1, got scales.shape=", Shape(scales->dimensions()),
                           " for amax.shape=", Shape(amax.dimensions()));
  }
  if (!(largest_value > 0)) {
    return InvalidArgument("mx_jax tensor_scale: needs largest_value > 0, got largest_value=",
                           largest_value);
  }
  const int64_t count = static_cast<int64_t>(scales->element_count());
  const int64_t each = count == 0 ? 0 : static_cast<int64_t>(amax.element_count()) / count;
  const int32_t* from = amax.typed_data();
  float* to = scales->typed_data();
  KeepSubnormals environment;
  for (int64_t i = 0; i < count; ++i, from += each) {
    int32_t largest = 0;
    for (int64_t j = 0; j < each; ++j) largest = std::max(largest, from[j]);
    to[i] = TensorScaleOf(static_cast<uint32_t>(largest), largest_value);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxTensorScale, mx::TensorScale,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("largest_value"));
