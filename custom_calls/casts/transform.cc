// The handler of block Hadamard transforms along an axis.
#include "casts/transform.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "casts/attributes.h"
#include "casts/draw.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kPart = 1 << 14;  // values of a task, about

const TransformKernels& ChosenTransformKernels() {
  static const TransformKernels* const kKernels[kNumIsas] = MX_KERNELS(kTransform);
  return Pick(kKernels);
}

// `x` `[*batch, *outer, length, *inner]` and int32 `signs` `[*batch, size]`, of which negative ones
// stand for -1, or keys that they are drawn by, to `[*batch, *outer, whole_length, *inner]`, which is
// the length in whole groups. `num_inner` axes are inner ones.
ffi::Error Transform(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer signs,
                     ffi::Result<ffi::Buffer<ffi::F32>> out, int32_t num_inner, int32_t size,
                     ffi::Span<const int64_t> derivations) {
  const auto shape = x.dimensions(), signed_by = signs.dimensions(), wanted = out->dimensions();
  const int64_t rank = static_cast<int64_t>(shape.size());
  const int64_t batch = static_cast<int64_t>(signed_by.size()) - 1, axis = rank - 1 - num_inner;
  const bool drawn = signs.element_type() == ffi::U32;
  const bool fits = batch >= 0 && num_inner >= 0 && axis >= batch && wanted.size() == shape.size() &&
                    std::equal(shape.begin(), shape.begin() + axis, wanted.begin()) &&
                    std::equal(shape.begin(), shape.begin() + batch, signed_by.begin()) &&
                    (drawn || (signs.element_type() == ffi::S32 && signed_by.back() == size)) &&
                    std::equal(shape.begin() + axis + 1, shape.end(), wanted.begin() + axis + 1);
  if (!fits) {
    return InvalidArgument(
        "mx_jax transform: needs x [*batch, *outer, length, *inner], signs [*batch, size] and out ",
        "[*batch, *outer, whole_length, *inner], got x.shape=", Shape(shape), ", signs.shape=",
        Shape(signed_by), ", out.shape=", Shape(wanted), ", num_inner=", num_inner, ", size=", size);
  }
  TransformPlan plan;
  plan.size = size;
  if (plan.size < 2 || plan.size > kMaxTransform || (plan.size & (plan.size - 1)) != 0) {
    return InvalidArgument("mx_jax transform: size must be a power of two of 2 to ", kMaxTransform,
                           ", got size=", plan.size);
  }
  MX_RETURN_IF_ERROR(ParseFloatType(x, &plan.type, "transform:"));
  plan.length = shape[axis];
  const auto product = [&](int64_t first, int64_t last) {
    return std::accumulate(shape.begin() + first, shape.begin() + last, int64_t{1},
                           std::multiplies<int64_t>());
  };
  plan.inner = product(axis + 1, rank);
  const int64_t groups = (plan.length + plan.size - 1) / plan.size;
  const int64_t whole_length = groups * plan.size;
  if (wanted[axis] != whole_length) {
    return InvalidArgument("mx_jax transform: the result must be of whole groups, got length=",
                           plan.length, ", whole_length=", wanted[axis], ", size=", plan.size);
  }
  const int64_t outer = product(batch, axis), in_stride = plan.length * plan.inner;
  const int64_t out_stride = whole_length * plan.inner, slices = product(0, axis);
  if (slices == 0 || groups == 0 || plan.inner == 0) return ffi::Error::Success();
  std::vector<uint32_t> keys;
  std::vector<int32_t> drawn_signs;
  const int32_t* all_signs = static_cast<const int32_t*>(signs.untyped_data());
  if (drawn) {
    MX_RETURN_IF_ERROR(DeriveKeys("transform", signs, shape, derivations, &keys));
    drawn_signs.resize(keys.size() / 2 * static_cast<size_t>(size));
    DrawBits(pool, keys, 32, size, drawn_signs.data());
    all_signs = drawn_signs.data();
  }
  const int64_t width = SizeOf(plan.type);
  const char* from = static_cast<const char*>(x.untyped_data());
  const TransformKernels& kernels = ChosenTransformKernels();
  // A task has groups of one slice, or many short slices.
  const int64_t step = std::max<int64_t>(1, kPart / (plan.size * plan.inner));
  const int64_t parts = (groups + step - 1) / step;
  const int64_t together = parts > 1 ? 1 : std::max<int64_t>(1, kPart / in_stride);
  const int64_t tasks = parts > 1 ? slices * parts : (slices + together - 1) / together;
  ParallelFor(pool, tasks, [&](int64_t task) {
    const int64_t first = parts > 1 ? task / parts : task * together;
    const int64_t last = std::min(slices, first + together);
    const int64_t group = parts > 1 ? (task - first * parts) * step : 0;
    for (int64_t slice = first; slice < last; ++slice) {
      TransformPlan slice_plan = plan;
      slice_plan.x = from + slice * in_stride * width;
      slice_plan.signs = all_signs + slice / outer * plan.size;
      slice_plan.out = out->typed_data() + slice * out_stride;
      kernels.groups(slice_plan, group, std::min(groups, group + step));
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxTransform, mx::Transform,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int32_t>("num_inner")
                                  .Attr<int32_t>("size")
                                  .Attr<xla::ffi::Span<const int64_t>>("derivations"));
