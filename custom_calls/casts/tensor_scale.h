// Tensor scales that a cast finds itself, of the largest magnitude of the blocks without NaN or Inf.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_TENSOR_SCALE_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_TENSOR_SCALE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "casts/operands.h"
#include "casts/share.h"
#include "common/checks.h"
#include "common/float_environment.h"
#include "common/thread_pool.h"
#include "common/tiny.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

// Whether `scales` is `shape` with all axes from some on reduced to 1.
inline bool IsReduced(xla::ffi::Span<const int64_t> shape, xla::ffi::Span<const int64_t> scales) {
  if (shape.size() != scales.size()) return false;
  size_t axis = 0;
  while (axis < shape.size() && shape[axis] == scales[axis]) ++axis;
  while (axis < shape.size() && scales[axis] == 1) ++axis;
  return axis == shape.size();
}

// Result `index` of `rest`, which the plan takes: a scale for each of equal parts of x.
template <class Pool>
xla::ffi::Error FindTensorScales(Pool& pool, const xla::ffi::AnyBuffer& x,
                                 const xla::ffi::RemainingRets& rest, size_t index,
                                 float largest_value, QuantizePlan* plan) {
  if (largest_value == 0) return xla::ffi::Error::Success();
  auto found = rest.get<xla::ffi::Buffer<xla::ffi::F32>>(index);
  if (found.has_error()) return found.error();
  xla::ffi::Buffer<xla::ffi::F32>& scales = **found;
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
  return xla::ffi::Error::Success();
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_TENSOR_SCALE_H_
