// The dequantizing handler: checks every shape, dtype and attribute, then shares the blocks out.
#include "casts/dequantize.h"

#include <cstdint>

#include "casts/attributes.h"
#include "casts/decoding.h"
#include "casts/geometry.h"
#include "casts/lift.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

ffi::Error CheckOperands(ffi::AnyBuffer codes, ffi::AnyBuffer scales, const Dimensions& shape,
                         const Geometry& geometry, const DequantizePlan& plan) {
  if (codes.element_type() != ffi::U8 || !SameShape(codes.dimensions(), shape)) {
    return InvalidArgument("mx_jax dequantize: codes must be uint8 of shape ", Shape(shape),
                           ", got codes.shape=", Shape(codes.dimensions()));
  }
  const bool bytes = HasByteScales(plan);
  const Dimensions scales_shape = ScalesShape(shape, geometry);
  if (scales.element_type() != (bytes ? ffi::U8 : ffi::F32) ||
      !SameShape(scales.dimensions(), scales_shape)) {
    return InvalidArgument("mx_jax dequantize: scales must be ", bytes ? "uint8" : "float32",
                           " of shape ", Shape(scales_shape), " for values of shape ", Shape(shape),
                           ", got scales.shape=", Shape(scales.dimensions()));
  }
  return ffi::Error::Success();
}

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Dictionary attributes) {
  ffi::Span<const int64_t> blocks;
  bool has_tensor_scale = false;
  MX_RETURN_IF_ERROR(ReadAttribute("dequantize", attributes, "blocks", &blocks));
  MX_RETURN_IF_ERROR(
      ReadAttribute("dequantize", attributes, "has_tensor_scale", &has_tensor_scale));
  DequantizePlan plan{};
  MX_RETURN_IF_ERROR(ReadFormat("dequantize", attributes, &plan));
  MX_RETURN_IF_ERROR(ParseFloatType("dequantize", *out, &plan.type));
  const Dimensions shape(out->dimensions().begin(), out->dimensions().end());
  Geometry geometry;
  MX_RETURN_IF_ERROR(FindGeometry("dequantize", shape, blocks, &geometry));
  MX_RETURN_IF_ERROR(CheckOperands(codes, scales, shape, geometry, plan));
  if (rest.size() != (has_tensor_scale ? 1 : 0)) {
    return InvalidArgument("mx_jax dequantize: needs ", has_tensor_scale ? 1 : 0,
                           " operands after scales for has_tensor_scale=", has_tensor_scale,
                           ", got ", rest.size());
  }
  if (has_tensor_scale) {
    MX_RETURN_IF_ERROR(TakeTensorScale("dequantize", rest, 0, geometry.outer, &plan.tensor_scales,
                                       &plan.num_tensor_scales));
  }
  plan.codes = static_cast<const uint8_t*>(codes.untyped_data());
  plan.scales = scales.untyped_data();
  plan.out = out->untyped_data();
  FillPlan(geometry, &plan);
  const int64_t size = static_cast<int64_t>(out->element_count());
  DequantizeBlocks(pool, size, plan, ChosenDequantizeKernels());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxDequantize, mx::Dequantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attrs());
