// Casts under tiny tensor scales: kernels run on values and scales that are lifted, on both sides of
// a cast. Rare, so it takes its time and memory of its own.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_LIFT_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_LIFT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "casts/dequantize.h"
#include "common/float_types.h"
#include "casts/quantize.h"
#include "casts/share.h"
#include "common/float_environment.h"
#include "common/thread_pool.h"
#include "common/tiny.h"

namespace mx {

// What a plan that was changed points to.
struct Lifted {
  std::unique_ptr<float[]> values, scales;
};

template <class Plan>
bool AnyTiny(const Plan& plan) {
  return std::any_of(plan.tensor_scales, plan.tensor_scales + plan.num_tensor_scales, IsTiny);
}

// Runs work(begin, end, tiny) over the elements of a plan, each time under one tensor scale.
template <class Pool, class Plan, class Work>
void ShareParts(Pool& pool, const Plan& plan, const Work& work) {
  const int64_t slices = plan.outer / plan.num_tensor_scales;
  const int64_t part = slices * plan.rows * plan.length * plan.inner;
  const int64_t tasks = (part + kTaskElements - 1) / kTaskElements;
  ParallelFor(pool, plan.num_tensor_scales * tasks, [&](int64_t task) {
    const int64_t index = task / tasks, first = (task - index * tasks) * kTaskElements;
    work(index * part + first, index * part + std::min(first + kTaskElements, part),
         IsTiny(plan.tensor_scales[index]));
  });
}

// Tensor scales of the plan, lifted where they are tiny; the plan takes these from now on.
template <class Plan>
std::unique_ptr<float[]> LiftScales(Plan* plan) {
  KeepSubnormals environment;
  const int64_t count = plan->num_tensor_scales;
  std::unique_ptr<float[]> scales(new float[static_cast<size_t>(count)]);
  for (int64_t i = 0; i < count; ++i) {
    const float scale = plan->tensor_scales[i];
    scales[i] = scale * LiftOf(IsTiny(scale));
  }
  plan->tensor_scales = scales.get();
  return scales;
}

// Where a tensor scale is tiny, the plan takes float32 values instead of x.
template <class Pool>
Lifted LiftTiny(Pool& pool, int64_t size, QuantizePlan* plan) {
  Lifted lifted;
  if (size == 0 || !AnyTiny(*plan)) return lifted;
  lifted.values.reset(new float[static_cast<size_t>(size)]);
  float* to = lifted.values.get();
  ShareParts(pool, *plan, [&](int64_t begin, int64_t end, bool tiny) {
    ByType(plan->type, [&](auto type) {
      const auto* x = static_cast<const decltype(type)*>(plan->x);
      for (int64_t i = begin; i < end; ++i) to[i] = Widen(x[i]) * LiftOf(tiny);
    });
  });
  plan->x = to;
  plan->type = FloatType::kF32;
  lifted.scales = LiftScales(plan);
  return lifted;
}

// Runs the kernels of a plan; values under tiny tensor scales are lowered afterwards.
template <class Pool>
void DequantizeBlocks(Pool& pool, int64_t size, const DequantizePlan& plan,
                      const DequantizeKernels& kernels) {
  if (size == 0) return;
  if (!AnyTiny(plan)) return ShareBlocks(pool, plan, kernels);
  DequantizePlan large = plan;
  const std::unique_ptr<float[]> scales = LiftScales(&large);
  std::unique_ptr<float[]> values;
  if (plan.type != FloatType::kF32) {
    values.reset(new float[static_cast<size_t>(size)]);
    large.out = values.get();
    large.type = FloatType::kF32;
  }
  ShareBlocks(pool, large, kernels);
  const float* from = static_cast<const float*>(large.out);
  ShareParts(pool, plan, [&](int64_t begin, int64_t end, bool tiny) {
    ByType(plan.type, [&](auto type) {
      auto* out = static_cast<decltype(type)*>(plan.out);
      for (int64_t i = begin; i < end; ++i) StoreValue(out + i, from[i] * LoweringOf(tiny));
    });
  });
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_LIFT_H_
