// The handler that reads an array once and quantizes it twice: in blocks along the last axis, and in
// blocks along an earlier one. Training needs both.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/checks.h"
#include "cpu/attributes.h"
#include "cpu/geometry.h"
#include "cpu/quantize.h"
#include "cpu/quantize_operands.h"
#include "cpu/share.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// One of the two casts: its attributes have the names of the single cast's, after a prefix.
struct Side {
  CastAttributes attributes{};
  ffi::Span<const int64_t> blocks;
  Geometry geometry;
  QuantizePlan plan{};
};

template <class T>
ffi::Error Read(const ffi::Dictionary& all, const std::string& prefix, const char* name, T* value) {
  auto found = all.get<T>(prefix + name);
  if (found.has_error()) {
    return InvalidArgument("mx_jax quantize: attribute ", prefix, name, ": ",
                           found.error().message());
  }
  *value = *found;
  return ffi::Error::Success();
}

ffi::Error ReadSide(const ffi::Dictionary& all, const std::string& prefix, ffi::AnyBuffer x,
                    Side* side) {
  CastAttributes& given = side->attributes;
  MX_RETURN_IF_ERROR(Read(all, prefix, "blocks", &side->blocks));
  MX_RETURN_IF_ERROR(Read(all, prefix, "element", &given.element));
  MX_RETURN_IF_ERROR(Read(all, prefix, "rounding", &given.rounding));
  MX_RETURN_IF_ERROR(Read(all, prefix, "random_bits", &given.random_bits));
  MX_RETURN_IF_ERROR(Read(all, prefix, "rule", &given.rule));
  MX_RETURN_IF_ERROR(Read(all, prefix, "scale_element", &given.scale_element));
  MX_RETURN_IF_ERROR(Read(all, prefix, "threshold", &given.threshold));
  MX_RETURN_IF_ERROR(Read(all, prefix, "has_tensor_scale", &given.has_tensor_scale));
  MX_RETURN_IF_ERROR(ParseCast(given, &side->plan));
  MX_RETURN_IF_ERROR(ParseFloatType("quantize", x, &side->plan.type));
  MX_RETURN_IF_ERROR(FindGeometry("quantize", x.dimensions(), side->blocks, &side->geometry));
  FillPlan(side->geometry, false, &side->plan);
  return ffi::Error::Success();
}

// Rows as `[outer * length, inner]` of the columns' `[outer, length, inner]`. Axes in between would
// be part of `inner`, which then holds several rows: as good as one, if they are whole blocks.
ffi::Error AlignRows(const Geometry& columns, int64_t rank, Side* rows) {
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
                        ffi::Result<ffi::AnyBuffer> other_scales, ffi::Dictionary attributes) {
  Side last, other;
  MX_RETURN_IF_ERROR(ReadSide(attributes, "last_", x, &last));
  MX_RETURN_IF_ERROR(ReadSide(attributes, "other_", x, &other));
  const int64_t rank = static_cast<int64_t>(x.dimensions().size());
  MX_RETURN_IF_ERROR(AlignRows(other.geometry, rank, &last));
  MX_RETURN_IF_ERROR(TakeResults(x, last.geometry, false, *codes, *scales, &last.plan));
  MX_RETURN_IF_ERROR(
      TakeResults(x, other.geometry, false, *other_codes, *other_scales, &other.plan));
  const size_t first = NumOperands(last.attributes);
  MX_RETURN_IF_ERROR(CheckCount(rest, first + NumOperands(other.attributes)));
  MX_RETURN_IF_ERROR(TakeOperands(rest, 0, x, last.attributes, &last.plan));
  MX_RETURN_IF_ERROR(TakeOperands(rest, first, x, other.attributes, &other.plan));
  if (x.element_count() != 0) {
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
                                  .Attrs());
