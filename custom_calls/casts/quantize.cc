// The quantizing handler: checks every shape, dtype and attribute, then shares the blocks out.
#include "casts/quantize.h"

#include "casts/lift.h"
#include "casts/operands.h"
#include "casts/share.h"
#include "casts/tensor_scale.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                    ffi::RemainingRets found, ffi::Dictionary attributes) {
  Cast cast;
  MX_RETURN_IF_ERROR(ReadCast(attributes, "", x, &cast));
  MX_RETURN_IF_ERROR(TakeResults(x, cast.geometry, *codes, *scales, &cast.plan));
  MX_RETURN_IF_ERROR(
      CheckCount(rest, NumOperands(cast.attributes), found, NumResults(cast.attributes)));
  MX_RETURN_IF_ERROR(TakeOperands(pool, rest, 0, x, &cast));
  MX_RETURN_IF_ERROR(
      FindTensorScales(pool, x, found, 0, cast.attributes.largest_value, &cast.plan));
  const Lifted lifted = LiftTiny(pool, static_cast<int64_t>(x.element_count()), &cast.plan);
  if (x.element_count() != 0) ShareBlocks(pool, cast.plan, ChosenQuantizeKernels());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxQuantize, mx::Quantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attrs());
