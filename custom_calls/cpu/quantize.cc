// The quantizing handler: checks every shape, dtype and attribute, then shares the blocks out.
#include "cpu/quantize.h"

#include <cstdint>
#include <string_view>

#include "common/checks.h"
#include "cpu/attributes.h"
#include "cpu/geometry.h"
#include "cpu/quantize_operands.h"
#include "cpu/share.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                    ffi::Span<const int64_t> blocks, ffi::Span<const int32_t> element,
                    std::string_view rounding, int32_t random_bits, std::string_view rule,
                    ffi::Span<const int32_t> scale_element, int32_t threshold,
                    bool has_tensor_scale, bool packed) {
  const CastAttributes attributes{element,       rounding,  random_bits,      rule,
                                  scale_element, threshold, has_tensor_scale, packed};
  QuantizePlan plan{};
  Geometry geometry;
  MX_RETURN_IF_ERROR(ParseCast(attributes, &plan));
  MX_RETURN_IF_ERROR(ParseFloatType("quantize", x, &plan.type));
  MX_RETURN_IF_ERROR(FindGeometry("quantize", x.dimensions(), blocks, &geometry));
  MX_RETURN_IF_ERROR(TakeResults(x, geometry, packed, *codes, *scales, &plan));
  MX_RETURN_IF_ERROR(CheckPacking("quantize", packed, geometry, plan.element));
  FillPlan(geometry, packed, &plan);
  MX_RETURN_IF_ERROR(CheckCount(rest, NumOperands(attributes)));
  MX_RETURN_IF_ERROR(TakeOperands(rest, 0, x, attributes, &plan));
  if (geometry.outer * geometry.inner * geometry.num_blocks != 0) {
    ShareBlocks(pool, plan, ChosenQuantizeKernels());
  }
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
                                  .Attr<xla::ffi::Span<const int64_t>>("blocks")
                                  .Attr<xla::ffi::Span<const int32_t>>("element")
                                  .Attr<std::string_view>("rounding")
                                  .Attr<int32_t>("random_bits")
                                  .Attr<std::string_view>("rule")
                                  .Attr<xla::ffi::Span<const int32_t>>("scale_element")
                                  .Attr<int32_t>("threshold")
                                  .Attr<bool>("has_tensor_scale")
                                  .Attr<bool>("packed"));
