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

ffi::Error Dequantize(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                      ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Dictionary attributes) {
  DequantizePlan plan{};
  Geometry geometry;
  const Dimensions shape(out->dimensions().begin(), out->dimensions().end());
  MX_RETURN_IF_ERROR(ParseFloatType(*out, &plan.type, "dequantize:"));
  MX_RETURN_IF_ERROR(
      ReadCoded("dequantize", attributes, shape, codes, scales, rest, &geometry, &plan));
  plan.out = out->untyped_data();
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
