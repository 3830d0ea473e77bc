// Operands and results of the quantizing handlers, checked, and the kernels that they run.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_OPERANDS_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "casts/attributes.h"
#include "casts/draw.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "products/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

// The kernels of the instruction set that runs.
inline const QuantizeKernels& ChosenQuantizeKernels() {
#if MX_X86
  // Not every machine with a later extension of AVX-512 has this one; today's have both.
  if (CurrentIsa() > kAvx512 && HasVbmi()) return avx512_vbmi::kQuantize;
#endif
  static const QuantizeKernels* const kKernels[kNumIsas] = MX_KERNELS(kQuantize);
  return Pick(kKernels);
}

// One cast of a handler: what its attributes say, and what follows for x.
struct Cast {
  CastAttributes attributes{};
  xla::ffi::Span<const int64_t> blocks;
  Geometry geometry;
  QuantizePlan plan{};
  std::unique_ptr<Scratch> drawn;  // random bits, where a key was given for them
};

// The attributes have their names after a prefix.
inline xla::ffi::Error ReadCast(const xla::ffi::Dictionary& all, const std::string& prefix,
                                xla::ffi::AnyBuffer x, Cast* cast) {
  CastAttributes& given = cast->attributes;
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "blocks", &cast->blocks));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "element", &given.element));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "rounding", &given.rounding));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "random_bits", &given.random_bits));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "derivations", &given.derivations));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "rule", &given.rule));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "scale_element",
                                   &given.scale_element));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "threshold", &given.threshold));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "target", &given.target));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "has_tensor_scale",
                                   &given.has_tensor_scale));
  MX_RETURN_IF_ERROR(ReadAttribute("quantize", all, prefix + "largest_value",
                                   &given.largest_value));
  if (!(given.largest_value >= 0) || (given.has_tensor_scale && given.largest_value != 0)) {
    return InvalidArgument("mx_jax quantize: largest_value must be above 0 where a tensor scale is ",
                           "to be found, else 0, got largest_value=", given.largest_value,
                           ", has_tensor_scale=", given.has_tensor_scale);
  }
  MX_RETURN_IF_ERROR(ParseCast(given, &cast->plan));
  MX_RETURN_IF_ERROR(ParseFloatType("quantize", x, &cast->plan.type));
  MX_RETURN_IF_ERROR(FindGeometry("quantize", x.dimensions(), cast->blocks, &cast->geometry));
  FillPlan(cast->geometry, &cast->plan);
  return xla::ffi::Error::Success();
}

// How many operands follow x.
inline size_t NumOperands(const CastAttributes& attributes) {
  return (attributes.has_tensor_scale ? 1 : 0) + (attributes.random_bits != 0 ? 1 : 0);
}

// And how many results follow codes and scales.
inline size_t NumResults(const CastAttributes& attributes) {
  return attributes.largest_value != 0 ? 1 : 0;
}

inline xla::ffi::Error CheckCount(const xla::ffi::RemainingArgs& rest, size_t expected,
                                  const xla::ffi::RemainingRets& found, size_t wanted) {
  if (rest.size() != expected) {
    return InvalidArgument("mx_jax quantize: needs ", expected, " operands after x: a tensor scale ",
                           "where has_tensor_scale says so, and random bits for stochastic ",
                           "rounding, got ", rest.size());
  }
  if (found.size() == wanted) return xla::ffi::Error::Success();
  return InvalidArgument("mx_jax quantize: needs ", wanted, " results after scales: a tensor scale ",
                         "where largest_value is not 0, got ", found.size());
}

template <class Pool>
xla::ffi::Error Draw(Pool& pool, const xla::ffi::AnyBuffer& keys, const xla::ffi::AnyBuffer& x,
                     Cast* cast) {
  std::vector<uint32_t> own;
  const CastAttributes& given = cast->attributes;
  MX_RETURN_IF_ERROR(DeriveKeys("quantize", keys, x.dimensions(), given.derivations, &own));
  const size_t size = x.element_count();
  cast->drawn = std::make_unique<Scratch>(size * sizeof(int32_t));
  int32_t* bits = reinterpret_cast<int32_t*>(cast->drawn->data());
  if (size != 0) {
    DrawBits(pool, own, given.random_bits, static_cast<int64_t>(size / (own.size() / 2)), bits);
  }
  cast->plan.random_bits = bits;
  return xla::ffi::Error::Success();
}

// From `first` on: `[tensor_scale]` and then `[random_bits]`, or the keys that these are drawn by, each
// where the attributes ask for it.
template <class Pool>
xla::ffi::Error TakeOperands(Pool& pool, const xla::ffi::RemainingArgs& rest, size_t first,
                             const xla::ffi::AnyBuffer& x, Cast* cast) {
  QuantizePlan* plan = &cast->plan;
  if (cast->attributes.has_tensor_scale) {
    MX_RETURN_IF_ERROR(TakeTensorScale("quantize", rest, first++, plan->outer,
                                       &plan->tensor_scales, &plan->num_tensor_scales));
  }
  if (cast->attributes.random_bits != 0) {
    auto bits = rest.get<xla::ffi::AnyBuffer>(first);
    if (bits.has_error()) return bits.error();
    if (bits->element_type() == xla::ffi::U32) return Draw(pool, *bits, x, cast);
    if (bits->element_type() != xla::ffi::S32 || !SameShape(bits->dimensions(), x.dimensions())) {
      return InvalidArgument("mx_jax quantize: random_bits must be int32 of x.shape=",
                             Shape(x.dimensions()), ", got random_bits.shape=",
                             Shape(bits->dimensions()));
    }
    plan->random_bits = static_cast<const int32_t*>(bits->untyped_data());
  }
  return xla::ffi::Error::Success();
}

// The plan reads x and writes `codes` and `scales`, which must have the right shapes.
inline xla::ffi::Error TakeResults(xla::ffi::AnyBuffer x, const Geometry& geometry,
                                   xla::ffi::AnyBuffer codes, xla::ffi::AnyBuffer scales,
                                   QuantizePlan* plan) {
  const Dimensions expected(x.dimensions().begin(), x.dimensions().end());
  const Dimensions scales_shape = ScalesShape(expected, geometry);
  if (codes.element_type() != xla::ffi::U8 || !SameShape(codes.dimensions(), expected)) {
    return InvalidArgument("mx_jax quantize: codes must be uint8 of shape ", Shape(expected),
                           ", got codes.shape=", Shape(codes.dimensions()), " for x.shape=",
                           Shape(x.dimensions()));
  }
  const bool bytes = plan->rule.kind == ScaleFormatKind::kExponent ||
                     plan->rule.kind == ScaleFormatKind::kElement;
  if (scales.element_type() != (bytes ? xla::ffi::U8 : xla::ffi::F32) ||
      !SameShape(scales.dimensions(), scales_shape)) {
    return InvalidArgument("mx_jax quantize: scales must be ", bytes ? "uint8" : "float32",
                           " of shape ", Shape(scales_shape), ", got scales.shape=",
                           Shape(scales.dimensions()), " for x.shape=", Shape(x.dimensions()));
  }
  plan->x = x.untyped_data();
  plan->streams = static_cast<int64_t>(x.element_count()) >= kStreamedElements;
  plan->codes = static_cast<uint8_t*>(codes.untyped_data());
  plan->scales = scales.untyped_data();
  return xla::ffi::Error::Success();
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_OPERANDS_H_
