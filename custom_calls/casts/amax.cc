// The handler that finds the largest magnitude of a tensor, run by run.
#include <algorithm>
#include <cstdint>

#include "casts/attributes.h"
#include "casts/geometry.h"
#include "casts/operands.h"
#include "casts/quantize.h"
#include "casts/share.h"
#include "common/checks.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// `amax`: patterns, int32, of the shape of x with each axis after the first blocked one reduced to 1,
// and that one to its blocks; or to 1 too, where nothing but axes of 1 follows.
ffi::Error Amax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax,
                ffi::Span<const int64_t> blocks) {
  QuantizePlan plan{};
  Geometry geometry;
  MX_RETURN_IF_ERROR(ParseFloatType("amax", x, &plan.type));
  MX_RETURN_IF_ERROR(FindGeometry("amax", x.dimensions(), blocks, &geometry));
  Dimensions expected(x.dimensions().begin(), x.dimensions().end());
  const int64_t rank = static_cast<int64_t>(expected.size());
  const BlockedAxis first = geometry.axes.front();
  const bool single = geometry.inner == 1 && geometry.block_rows == 0;
  const int64_t num_runs = single ? 1 : CeilDivide(expected[first.axis], first.size);
  for (int64_t axis = first.axis; axis < rank; ++axis) expected[axis] = 1;
  expected[first.axis] = num_runs;
  if (amax->element_type() != ffi::S32 || !SameShape(amax->dimensions(), expected)) {
    return InvalidArgument("mx_jax amax: amax must be int32 of shape ", Shape(expected),
                           ", got amax.shape=", Shape(amax->dimensions()),
                           " for x.shape=", Shape(x.dimensions()));
  }
  FillPlan(geometry, &plan);
  plan.x = x.untyped_data();
  const int64_t runs = static_cast<int64_t>(amax->element_count());
  int32_t* out = static_cast<int32_t*>(amax->untyped_data());
  if (x.element_count() == 0) {
    std::fill(out, out + runs, 0);
    return ffi::Error::Success();
  }
  const int64_t elements = std::max<int64_t>(static_cast<int64_t>(x.element_count()) / runs, 1);
  const int64_t step = std::max<int64_t>(kTaskElements / elements, 1);
  const QuantizeKernels& kernels = ChosenQuantizeKernels();
  ParallelFor(pool, (runs + step - 1) / step, [&](int64_t task) {
    kernels.amax(plan, task * step, std::min((task + 1) * step, runs), out);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxAmax, mx::Amax,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<xla::ffi::Span<const int64_t>>("blocks"));
