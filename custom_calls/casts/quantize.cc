// The quantizing handlers: check every shape, dtype and attribute, then share the blocks out.
#include "casts/quantize.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "casts/attributes.h"
#include "casts/draw.h"
#include "casts/geometry.h"
#include "casts/lift.h"
#include "casts/share.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/float_environment.h"
#include "common/thread_pool.h"
#include "common/tiny.h"
#include "products/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// The kernels of the instruction set that runs.
const QuantizeKernels& ChosenQuantizeKernels() {
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
  ffi::Span<const int64_t> blocks;
  Geometry geometry;
  QuantizePlan plan{};
  std::unique_ptr<Scratch> drawn;  // random bits, where a key was given for them
  Lifted lifted;
};

// The attributes have their names after a prefix.
ffi::Error ReadCast(const ffi::Dictionary& all, const std::string& prefix, ffi::AnyBuffer x,
                    Cast* cast) {
  CastAttributes& attributes = cast->attributes;
  const auto read = [&](const char* name, auto* value) {
    return ReadAttribute("quantize", all, prefix + name, value);
  };
  MX_RETURN_IF_ERROR(read("blocks", &cast->blocks));
  MX_RETURN_IF_ERROR(read("element", &attributes.element));
  MX_RETURN_IF_ERROR(read("rounding", &attributes.rounding));
  MX_RETURN_IF_ERROR(read("random_bits", &attributes.random_bits));
  MX_RETURN_IF_ERROR(read("derivations", &attributes.derivations));
  MX_RETURN_IF_ERROR(read("rule", &attributes.rule));
  MX_RETURN_IF_ERROR(read("scale_element", &attributes.scale_element));
  MX_RETURN_IF_ERROR(read("threshold", &attributes.threshold));
  MX_RETURN_IF_ERROR(read("target", &attributes.target));
  MX_RETURN_IF_ERROR(read("has_tensor_scale", &attributes.has_tensor_scale));
  MX_RETURN_IF_ERROR(read("largest_value", &attributes.largest_value));
  const float largest = attributes.largest_value;
  if (!(largest >= 0) || (attributes.has_tensor_scale && largest != 0)) {
    return InvalidArgument("mx_jax quantize: largest_value must be above 0 where a tensor scale is ",
                           "to be found, else 0, got largest_value=", largest,
                           ", has_tensor_scale=", attributes.has_tensor_scale);
  }
  MX_RETURN_IF_ERROR(ParseCast(attributes, &cast->plan));
  MX_RETURN_IF_ERROR(ParseFloatType(x, &cast->plan.type, "quantize:"));
  MX_RETURN_IF_ERROR(FindGeometry("quantize", x.dimensions(), cast->blocks, &cast->geometry));
  FillPlan(cast->geometry, &cast->plan);
  return ffi::Error::Success();
}

// How many operands follow x.
size_t NumOperands(const CastAttributes& attributes) {
  return (attributes.has_tensor_scale ? 1 : 0) + (attributes.random_bits != 0 ? 1 : 0);
}

// And how many results follow codes and scales.
size_t NumResults(const CastAttributes& attributes) {
  return attributes.largest_value != 0 ? 1 : 0;
}

ffi::Error CheckCount(const ffi::RemainingArgs& rest, size_t expected,
                      const ffi::RemainingRets& results, size_t wanted) {
  if (rest.size() != expected) {
    return InvalidArgument("mx_jax quantize: needs ", expected, " operands after x: a tensor scale ",
                           "where has_tensor_scale says so, and random bits for stochastic ",
                           "rounding, got ", rest.size());
  }
  if (results.size() == wanted) return ffi::Error::Success();
  return InvalidArgument("mx_jax quantize: needs ", wanted, " results after scales: a tensor scale ",
                         "where largest_value is not 0, got ", results.size());
}

template <class Pool>
ffi::Error Draw(Pool& pool, const ffi::AnyBuffer& keys, const ffi::AnyBuffer& x, Cast* cast) {
  std::vector<uint32_t> words;
  const CastAttributes& attributes = cast->attributes;
  MX_RETURN_IF_ERROR(DeriveKeys("quantize", keys, x.dimensions(), attributes.derivations, &words));
  const size_t size = x.element_count();
  cast->drawn = std::make_unique<Scratch>(size * sizeof(int32_t));
  int32_t* bits = reinterpret_cast<int32_t*>(cast->drawn->data());
  if (size != 0) {
    const int64_t places = static_cast<int64_t>(size / (words.size() / 2));
    DrawBits(pool, words, attributes.random_bits, places, bits);
  }
  cast->plan.random_bits = bits;
  return ffi::Error::Success();
}

// From `first` on: `[tensor_scale]` and then `[random_bits]`, or the keys that these are drawn by, each
// where the attributes ask for it.
template <class Pool>
ffi::Error TakeOperands(Pool& pool, const ffi::RemainingArgs& rest, size_t first,
                        const ffi::AnyBuffer& x, Cast* cast) {
  QuantizePlan* plan = &cast->plan;
  if (cast->attributes.has_tensor_scale) {
    MX_RETURN_IF_ERROR(TakeTensorScale("quantize", rest, first++, plan->outer,
                                       &plan->tensor_scales, &plan->num_tensor_scales));
  }
  if (cast->attributes.random_bits != 0) {
    auto bits = rest.get<ffi::AnyBuffer>(first);
    if (bits.has_error()) return bits.error();
    if (bits->element_type() == ffi::U32) return Draw(pool, *bits, x, cast);
    if (bits->element_type() != ffi::S32 || !SameShape(bits->dimensions(), x.dimensions())) {
      return InvalidArgument("mx_jax quantize: random_bits must be int32 of x.shape=",
                             Shape(x.dimensions()), ", got random_bits.shape=",
                             Shape(bits->dimensions()));
    }
    plan->random_bits = static_cast<const int32_t*>(bits->untyped_data());
  }
  return ffi::Error::Success();
}

// The plan reads x and writes `codes` and `scales`, which must have the right shapes.
ffi::Error TakeResults(ffi::AnyBuffer x, const Geometry& geometry, ffi::AnyBuffer codes,
                       ffi::AnyBuffer scales, QuantizePlan* plan) {
  const Dimensions expected(x.dimensions().begin(), x.dimensions().end());
  const Dimensions scales_shape = ScalesShape(expected, geometry);
  if (codes.element_type() != ffi::U8 || !SameShape(codes.dimensions(), expected)) {
    return InvalidArgument("mx_jax quantize: codes must be uint8 of shape ", Shape(expected),
                           ", got codes.shape=", Shape(codes.dimensions()), " for x.shape=",
                           Shape(x.dimensions()));
  }
  const bool bytes = plan->rule.kind == ScaleFormatKind::kExponent ||
                     plan->rule.kind == ScaleFormatKind::kElement;
  if (scales.element_type() != (bytes ? ffi::U8 : ffi::F32) ||
      !SameShape(scales.dimensions(), scales_shape)) {
    return InvalidArgument("mx_jax quantize: scales must be ", bytes ? "uint8" : "float32",
                           " of shape ", Shape(scales_shape), ", got scales.shape=",
                           Shape(scales.dimensions()), " for x.shape=", Shape(x.dimensions()));
  }
  plan->x = x.untyped_data();
  plan->streams = static_cast<int64_t>(x.element_count()) >= kStreamedElements;
  plan->codes = static_cast<uint8_t*>(codes.untyped_data());
  plan->scales = scales.untyped_data();
  return ffi::Error::Success();
}

// Whether `scales` is `shape` with all axes from some on reduced to 1.
bool IsReduced(ffi::Span<const int64_t> shape, ffi::Span<const int64_t> scales) {
  if (shape.size() != scales.size()) return false;
  size_t axis = 0;
  while (axis < shape.size() && shape[axis] == scales[axis]) ++axis;
  while (axis < shape.size() && scales[axis] == 1) ++axis;
  return axis == shape.size();
}

// Result `index` of `rest`, which the plan takes: a tensor scale for each of equal parts of x, of the
// largest magnitude of its blocks without NaN or Inf.
template <class Pool>
ffi::Error FindTensorScales(Pool& pool, const ffi::AnyBuffer& x, const ffi::RemainingRets& rest,
                            size_t index, Cast* cast) {
  QuantizePlan* plan = &cast->plan;
  const float largest_value = cast->attributes.largest_value;
  if (largest_value == 0) return ffi::Error::Success();
  auto result = rest.get<ffi::Buffer<ffi::F32>>(index);
  if (result.has_error()) return result.error();
  ffi::Buffer<ffi::F32>& scales = **result;
  const int64_t count = static_cast<int64_t>(scales.element_count());
  if (!IsReduced(x.dimensions(), scales.dimensions()) || (count != 0 && plan->outer % count != 0)) {
    return InvalidArgument("mx_jax quantize: tensor_scale must have the shape of x with its last ",
                           "axes, all blocked ones among them, reduced to 1, got tensor_scale.shape=",
                           Shape(scales.dimensions()), " for x.shape=", Shape(x.dimensions()));
  }
  const int64_t runs =
      plan->outer * (plan->block_rows != 0 ? CeilDivide(plan->rows, plan->block_rows)
                                           : plan->inner == 1 ? 1 : plan->blocks_per_row);
  std::vector<int32_t> amax(static_cast<size_t>(runs));
  if (const int64_t size = static_cast<int64_t>(x.element_count()); size != 0) {
    const int64_t step = std::max<int64_t>(kTaskElements / std::max<int64_t>(size / runs, 1), 1);
    const QuantizeKernels& kernels = ChosenQuantizeKernels();
    ParallelFor(pool, (runs + step - 1) / step, [&](int64_t task) {
      kernels.amax(*plan, task * step, std::min((task + 1) * step, runs), amax.data());
    });
  }
  KeepSubnormals environment;
  const int64_t each = count == 0 ? 0 : runs / count;
  for (int64_t i = 0; i < count; ++i) {
    int32_t largest = 0;
    for (int64_t j = i * each; j < (i + 1) * each; ++j) largest = std::max(largest, amax[j]);
    scales.typed_data()[i] = TensorScaleOf(static_cast<uint32_t>(largest), largest_value);
  }
  plan->tensor_scales = scales.typed_data();
  plan->num_tensor_scales = count;
  return ffi::Error::Success();
}

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

// What follows x, and what follows codes and scales, of all casts in their order.
template <class Pool>
ffi::Error TakeRest(Pool& pool, const ffi::AnyBuffer& x, const ffi::RemainingArgs& rest,
                    const ffi::RemainingRets& outputs, std::initializer_list<Cast*> casts) {
  size_t operands = 0, results = 0;
  for (const Cast* cast : casts) {
    operands += NumOperands(cast->attributes), results += NumResults(cast->attributes);
  }
  MX_RETURN_IF_ERROR(CheckCount(rest, operands, outputs, results));
  operands = results = 0;
  for (Cast* cast : casts) {
    MX_RETURN_IF_ERROR(TakeOperands(pool, rest, operands, x, cast));
    MX_RETURN_IF_ERROR(FindTensorScales(pool, x, outputs, results, cast));
    cast->lifted = LiftTiny(pool, static_cast<int64_t>(x.element_count()), &cast->plan);
    operands += NumOperands(cast->attributes), results += NumResults(cast->attributes);
  }
  return ffi::Error::Success();
}

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                    ffi::RemainingRets tensor_scales, ffi::Dictionary attributes) {
  Cast cast;
  MX_RETURN_IF_ERROR(ReadCast(attributes, "", x, &cast));
  MX_RETURN_IF_ERROR(TakeResults(x, cast.geometry, *codes, *scales, &cast.plan));
  MX_RETURN_IF_ERROR(TakeRest(pool, x, rest, tensor_scales, {&cast}));
  if (x.element_count() != 0) ShareBlocks(pool, cast.plan, ChosenQuantizeKernels());
  return ffi::Error::Success();
}

// Reads an array once and quantizes it twice: in blocks along the last axis, and in blocks along an
// earlier one. Training needs both.
ffi::Error QuantizeBoth(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::AnyBuffer> scales,
                        ffi::Result<ffi::AnyBuffer> other_codes,
                        ffi::Result<ffi::AnyBuffer> other_scales, ffi::RemainingRets tensor_scales,
                        ffi::Dictionary attributes) {
  Cast last, other;
  MX_RETURN_IF_ERROR(ReadCast(attributes, "last_", x, &last));
  MX_RETURN_IF_ERROR(ReadCast(attributes, "other_", x, &other));
  const int64_t rank = static_cast<int64_t>(x.dimensions().size());
  MX_RETURN_IF_ERROR(AlignRows(other.geometry, rank, &last));
  MX_RETURN_IF_ERROR(TakeResults(x, last.geometry, *codes, *scales, &last.plan));
  MX_RETURN_IF_ERROR(TakeResults(x, other.geometry, *other_codes, *other_scales, &other.plan));
  MX_RETURN_IF_ERROR(TakeRest(pool, x, rest, tensor_scales, {&last, &other}));
  if (x.element_count() != 0) ShareStrips(pool, last.plan, other.plan, ChosenQuantizeKernels());
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
