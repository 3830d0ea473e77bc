// The quantizing handler: checks every shape, dtype and attribute, then shares the blocks out.
#include "cpu/quantize.h"

#include <cstdint>
#include <string_view>

#include "common/checks.h"
#include "common/dispatch.h"
#include "cpu/attributes.h"
#include "cpu/geometry.h"
#include "cpu/share.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

#if MX_X86
const QuantizeKernels* const kKernels[kNumIsas] = {&kQuantizePortable, &kQuantizeAvx2,
                                                   &kQuantizeAvx512, nullptr, nullptr};
#else
const QuantizeKernels* const kKernels[kNumIsas] = {&kQuantizePortable, nullptr, nullptr, nullptr,
                                                   nullptr};
#endif

struct Operands {
  const float* tensor_scales = nullptr;
  int64_t num_tensor_scales = 0;
  const int32_t* random_bits = nullptr;
};

// `[tensor_scale]` and then `[random_bits]`, each where the attributes ask for it.
ffi::Error TakeOperands(ffi::RemainingArgs rest, const ffi::AnyBuffer& x, bool has_tensor_scale,
                        bool stochastic, int64_t outer, Operands* operands) {
  const size_t expected = (has_tensor_scale ? 1 : 0) + (stochastic ? 1 : 0);
  if (rest.size() != expected) {
    return InvalidArgument("mx_jax quantize: needs ", expected, " operands after x for ",
                           "has_tensor_scale=", has_tensor_scale, ", stochastic=", stochastic,
                           ", got ", rest.size());
  }
  if (has_tensor_scale) {
    MX_RETURN_IF_ERROR(TakeTensorScale("quantize", rest, outer, &operands->tensor_scales,
                                       &operands->num_tensor_scales));
  }
  if (stochastic) {
    auto bits = rest.get<ffi::AnyBuffer>(has_tensor_scale ? 1 : 0);
    if (bits.has_error()) return bits.error();
    if (bits->element_type() != ffi::S32 || !SameShape(bits->dimensions(), x.dimensions())) {
      return InvalidArgument("mx_jax quantize: random_bits must be int32 of x.shape=",
                             Shape(x.dimensions()), ", got random_bits.shape=",
                             Shape(bits->dimensions()));
    }
    operands->random_bits = static_cast<const int32_t*>(bits->untyped_data());
  }
  return ffi::Error::Success();
}

ffi::Error CheckResults(const ffi::AnyBuffer& x, const Geometry& geometry, bool packed,
                        const ElementFormat& element, const ScaleRule& rule, ffi::AnyBuffer codes,
                        ffi::AnyBuffer scales) {
  Dimensions expected(x.dimensions().begin(), x.dimensions().end());
  const Dimensions scales_shape = ScalesShape(expected, geometry);
  if (packed) expected.back() = PackedLength(expected.back(), element.bits);
  if (codes.element_type() != ffi::U8 || !SameShape(codes.dimensions(), expected)) {
    return InvalidArgument("mx_jax quantize: codes must be uint8 of shape ", Shape(expected),
                           ", got codes.shape=", Shape(codes.dimensions()), " for x.shape=",
                           Shape(x.dimensions()));
  }
  const bool bytes = rule.kind == ScaleFormatKind::kExponent || rule.kind == ScaleFormatKind::kElement;
  if (scales.element_type() != (bytes ? ffi::U8 : ffi::F32) ||
      !SameShape(scales.dimensions(), scales_shape)) {
    return InvalidArgument("mx_jax quantize: scales must be ", bytes ? "uint8" : "float32",
                           " of shape ", Shape(scales_shape), ", got scales.shape=",
                           Shape(scales.dimensions()), " for x.shape=", Shape(x.dimensions()));
  }
  return ffi::Error::Success();
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                    ffi::Span<const int64_t> blocks, ffi::Span<const int32_t> element,
                    std::string_view rounding, int32_t random_bits, std::string_view rule,
                    ffi::Span<const int32_t> scale_element, int32_t threshold,
                    bool has_tensor_scale, bool packed) {
  QuantizePlan plan{};
  MX_RETURN_IF_ERROR(ParseElement("quantize", "element", element, &plan.element));
  MX_RETURN_IF_ERROR(ParseRounding(rounding, random_bits, &plan.rounding));
  MX_RETURN_IF_ERROR(ParseRule(rule, threshold, scale_element, plan.element, &plan.rule));
  MX_RETURN_IF_ERROR(ParseFloatType("quantize", x, &plan.type));
  Geometry geometry;
  MX_RETURN_IF_ERROR(FindGeometry("quantize", x.dimensions(), blocks, &geometry));
  MX_RETURN_IF_ERROR(CheckResults(x, geometry, packed, plan.element, plan.rule, *codes, *scales));
  MX_RETURN_IF_ERROR(CheckPacking("quantize", packed, geometry, plan.element));
  Operands operands;
  const bool stochastic = plan.rounding == Rounding::kStochastic;
  MX_RETURN_IF_ERROR(
      TakeOperands(rest, x, has_tensor_scale, stochastic, geometry.outer, &operands));
  plan.x = x.untyped_data();
  plan.random_bits = operands.random_bits;
  plan.tensor_scales = operands.tensor_scales;
  plan.num_tensor_scales = operands.num_tensor_scales;
  plan.codes = static_cast<uint8_t*>(codes->untyped_data());
  plan.scales = scales->untyped_data();
  plan.outer = geometry.outer;
  plan.length = geometry.length;
  plan.inner = geometry.inner;
  plan.block = geometry.block;
  plan.blocks_per_row = geometry.num_blocks;
  if (packed && plan.element.bits != 8) {
    plan.row_bytes = PackedLength(geometry.length, plan.element.bits);
  }
  plan.num_random_bits = random_bits;
  if (geometry.outer * geometry.inner * geometry.num_blocks != 0) {
    ShareBlocks(pool, plan, Pick(kKernels));
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
