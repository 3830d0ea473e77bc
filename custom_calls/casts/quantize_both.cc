// The handler that reads an array once and quantizes it twice: in blocks along the last axis, and in
// blocks along an earlier one. Training needs both.
#include <cstddef>
#include <cstdint>

#include "casts/geometry.h"
#include "casts/lift.h"
#include "casts/operands.h"
#include "casts/share.h"
#include "casts/tensor_scale.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// Rows as `[outer * length, inner]` of the columns' `[outer, length, inner]`. Axes in between would
// be part of `inner`, which then holds several rows: as good as one, if they are whole blocks.
ffi::Error AlignRows(const Geometry& columns, int64_t rank, Cast* rows) {
  const Geometry& geometry = rows->geometry;
  const bool single = geometry.axes.size() == 1 && columns.axes.size() == 1;
  if (!single || geometry.inner != 1 || geometry.axes[0].axis != rank - 1 ||
      columns.axes[0].axis >= rank - 1) {
    return InvalidArgument("mx_jax quantize: both casts need one blocked axis each, the last and ",
                           "an earlier one, got last_blocks=", Shape(rows->blocks),
                           " of ", geometry.axes.size(), " axes, and ", columns.axes.size(),
                           " axes of the other, for rank=", rank);
  }
  if (columns.axes[0].axis != rank - 2 && geometry.length % geometry.block != 0) {
    return InvalidArgument("mx_jax quantize: axes between the two blocked ones need whole blocks ",
                           "along the last, got length=", geometry.length,
                           ", block=", geometry.block);
  }
  if (geometry.length == 0) return ffi::Error::Success();
  const int64_t rows_in_inner = columns.inner / geometry.length;
  QuantizePlan& plan = rows->plan;
  plan.outer = columns.outer * columns.length;
  plan.length = columns.inner;
  plan.blocks_per_row = geometry.num_blocks * rows_in_inner;
  return ffi::Error::Success();
}

ffi::Error QuantizeBoth(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                        ffi::Result<ffi::AnyBuffer> other_codes,
                        ffi::Result<ffi::AnyBuffer> other_scales, ffi::RemainingRets found,
                        ffi::Dictionary attributes) {
  Cast last, other;
  MX_RETURN_IF_ERROR(ReadCast(attributes, "last_", x, &last));
  MX_RETURN_IF_ERROR(ReadCast(attributes, "other_", x, &other));
  const int64_t rank = static_cast<int64_t>(x.dimensions().size());
  MX_RETURN_IF_ERROR(AlignRows(other.geometry, rank, &last));
  MX_RETURN_IF_ERROR(TakeResults(x, last.geometry, *codes, *scales, &last.plan));
  MX_RETURN_IF_ERROR(TakeResults(x, other.geometry, *other_codes, *other_scales, &other.plan));
  const size_t first = NumOperands(last.attributes);
  const size_t second = NumResults(last.attributes);
  MX_RETURN_IF_ERROR(CheckCount(rest, first + NumOperands(other.attributes), found,
                                second + NumResults(other.attributes)));
  MX_RETURN_IF_ERROR(TakeOperands(pool, rest, 0, x, &last));
  MX_RETURN_IF_ERROR(TakeOperands(pool, rest, first, x, &other));
  MX_RETURN_IF_ERROR(
      FindTensorScales(pool, x, found, 0, last.attributes.largest_value, &last.plan));
  MX_RETURN_IF_ERROR(
      FindTensorScales(pool, x, found, second, other.attributes.largest_value, &other.plan));
  const int64_t size = static_cast<int64_t>(x.element_count());
  const Lifted first_lifted = LiftTiny(pool, size, &last.plan);
  const Lifted second_lifted = LiftTiny(pool, size, &other.plan);
  if (size != 0) {
    ShareStrips(pool, last.plan, other.plan, ChosenQuantizeKernels());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxQuantizeBoth, mx::QuantizeBoth,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attrs());
