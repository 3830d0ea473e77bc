// The handler of a cast's statistics: reads values, codes and scales, and gives all of them at once.
#include "casts/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "casts/attributes.h"
#include "casts/decoding.h"
#include "casts/geometry.h"
#include "casts/lift.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "products/scratch.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;
using Counts = ffi::Result<ffi::Buffer<ffi::U32>>;
using Floats = ffi::Result<ffi::Buffer<ffi::F32>>;

constexpr int64_t kExponents = 256;  // values of float32's field
// Elements of a part, whose sums are made apart: sums do not depend on the number of threads.
constexpr int64_t kPartElements = 1 << 16;
constexpr int64_t kMostParts = 64;

const StatisticsKernels& ChosenStatisticsKernels() {
  static const StatisticsKernels* const kKernels[kNumIsas] = MX_KERNELS(kStatistics);
  return Pick(kKernels);
}

// Where the results of each tensor lie; several tensors are those of vmap, one after the other.
struct Results {
  float* channels;
  float* amax;
  uint32_t *exponents, *underflow, *saturated, *bad_blocks;
  float *signal, *noise;
};

// The scale of an element, by its place.
int64_t BlockAt(const DequantizePlan& plan, int64_t place) {
  if (plan.block_rows != 0) {
    const int64_t row = place / plan.length, column = place - row * plan.length;
    const int64_t slice = row / plan.rows, inside = row - slice * plan.rows;
    const int64_t high = CeilDivide(plan.rows, plan.block_rows);
    return (slice * high + inside / plan.block_rows) * plan.blocks_per_row + column / plan.block;
  }
  const int64_t slice = place / (plan.length * plan.inner);
  const int64_t rest = place - slice * plan.length * plan.inner, row = rest / plan.inner;
  return (slice * plan.blocks_per_row + row / plan.block) * plan.inner + rest - row * plan.inner;
}

// How many blocks of a tensor hold Inf or NaN.
uint32_t BadBlocks(const StatisticsPlan& plan, const DequantizePlan& coded, int64_t begin,
                   int64_t end, int64_t first_block, int64_t num_blocks) {
  std::vector<bool> bad(static_cast<size_t>(num_blocks));
  ByType(plan.type, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(plan.x);
    for (int64_t i = begin; i < end; ++i) {
      if ((BitsOf(Widen(x[i])) & kAbs) >= kInf) bad[BlockAt(coded, i) - first_block] = true;
    }
  });
  return static_cast<uint32_t>(std::count(bad.begin(), bad.end(), true));
}

// How many scales have which exponent, by float32's field of it.
void CountExponents(const DequantizePlan& coded, int64_t begin, int64_t end, uint32_t* counts) {
  std::fill(counts, counts + kExponents, 0);
  if (!HasByteScales(coded)) {
    const float* scales = static_cast<const float*>(coded.scales);
    for (int64_t i = begin; i < end; ++i) ++counts[(BitsOf(scales[i]) & kAbs) >> 23];
    return;
  }
  const uint8_t* scales = static_cast<const uint8_t*>(coded.scales);
  uint32_t codes[256] = {};
  for (int64_t i = begin; i < end; ++i) ++codes[scales[i]];
  for (int32_t code = 0; code < 256; ++code) {
    const float scale = coded.kind == ScaleFormatKind::kExponent ? DecodeE8m0(code)
                                                                 : coded.scale_values[code];
    counts[(BitsOf(scale) & kAbs) >> 23] += codes[code];
  }
}

double Sum(const double (&lanes)[kStatisticLanes]) {
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

// Squares over that of the power of two of amax, as mx_jax/reference/statistics.py has them.
float Relative(double squares, uint32_t amax) {
  const int32_t exponent = std::clamp<int32_t>(static_cast<int32_t>(amax >> 23), 1, 253) - 127;
  return static_cast<float>(std::ldexp(squares, -2 * exponent));
}

// One tensor of several, in parts.
struct Tensor {
  const StatisticsPlan& plan;
  const DequantizePlan& coded;
  int64_t number, size, num_blocks;
};

template <class Pool>
void Gather(Pool& pool, const Tensor& tensor, const Results& results) {
  const StatisticsPlan& plan = tensor.plan;
  const int64_t length = std::max<int64_t>(plan.inner == 1 ? plan.channels : plan.inner, 1);
  const int64_t runs = tensor.size / length, first = tensor.number * runs;
  // A part has a maximum of every channel: all of them together are no larger than the tensor.
  const int64_t fitting = std::min(runs, tensor.size / plan.channels);
  const int64_t wanted = std::min(tensor.size / kPartElements, kMostParts);
  const int64_t parts = std::clamp<int64_t>(fitting, 1, std::max<int64_t>(wanted, 1));
  const int64_t step = CeilDivide(runs, parts);
  std::vector<StatisticsTotals> totals(static_cast<size_t>(parts));
  std::vector<uint32_t> channels(static_cast<size_t>(parts * plan.channels));
  const StatisticsKernels& kernels = ChosenStatisticsKernels();
  ParallelFor(pool, parts, [&](int64_t part) {
    const int64_t begin = std::min(part * step, runs), end = std::min(begin + step, runs);
    kernels.runs(plan, first + begin, first + end, channels.data() + part * plan.channels,
                 &totals[part]);
  });
  StatisticsTotals all{};
  double signal = 0, noise = 0;
  for (const StatisticsTotals& part : totals) {
    all.amax = std::max(all.amax, part.amax);
    all.underflow += part.underflow;
    all.saturated += part.saturated;
    all.nonfinite += part.nonfinite;
    signal += Sum(part.signal);
    noise += Sum(part.noise);
  }
  const int64_t begin = tensor.number * tensor.size, block = tensor.number * tensor.num_blocks;
  const int64_t i = tensor.number;
  for (int64_t channel = 0; channel < plan.channels; ++channel) {
    uint32_t amax = 0;
    for (int64_t part = 0; part < parts; ++part) {
      amax = std::max(amax, channels[part * plan.channels + channel]);
    }
    results.channels[i * plan.channels + channel] = FloatOf(amax);
  }
  CountExponents(tensor.coded, block, block + tensor.num_blocks,
                 results.exponents + i * kExponents);
  results.amax[i] = FloatOf(all.amax);
  results.underflow[i] = static_cast<uint32_t>(all.underflow);
  results.saturated[i] = static_cast<uint32_t>(all.saturated);
  results.bad_blocks[i] = all.nonfinite == 0 ? 0
                                             : BadBlocks(plan, tensor.coded, begin,
                                                         begin + tensor.size, block,
                                                         tensor.num_blocks);
  results.signal[i] = Relative(signal, all.amax);
  results.noise[i] = Relative(noise, all.amax);
}

// `channels` is `[*vmap, channels]`, `exponents` `[*vmap, 256]`, the others `[*vmap]`; `axis`, from
// the end, is that of the channels.
ffi::Error CastStatistics(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                          ffi::AnyBuffer scales, ffi::RemainingArgs rest, Floats channels,
                          Floats amax, Counts exponents, Counts underflow, Counts saturated,
                          Counts bad_blocks, Floats signal, Floats noise,
                          ffi::Dictionary attributes) {
  const Dimensions shape(x.dimensions().begin(), x.dimensions().end());
  StatisticsPlan plan{};
  DequantizePlan coded{};
  Geometry geometry;
  int64_t axis = 0;
  MX_RETURN_IF_ERROR(ParseFloatType(x, &plan.type, "statistics:"));
  MX_RETURN_IF_ERROR(
      ReadCoded("statistics", attributes, shape, codes, scales, rest, &geometry, &coded));
  MX_RETURN_IF_ERROR(ReadAttribute("statistics", attributes, "axis", &axis));
  const int64_t rank = static_cast<int64_t>(shape.size());
  const int64_t tensors = static_cast<int64_t>(amax->element_count());
  const int64_t size = static_cast<int64_t>(x.element_count());
  if (axis >= 0 || axis < -rank || size == 0 || tensors == 0 || size % tensors != 0) {
    return InvalidArgument("mx_jax statistics: needs elements, and channels along an axis in -",
                           rank, "..-1, got x.shape=", Shape(shape), ", axis=", axis, " for ",
                           tensors, " tensors");
  }
  plan.channels = shape[axis + rank];
  plan.inner = 1;
  for (int64_t after = axis + rank + 1; after < rank; ++after) plan.inner *= shape[after];
  const bool fits =
      static_cast<int64_t>(channels->element_count()) == tensors * plan.channels &&
      static_cast<int64_t>(exponents->element_count()) == tensors * kExponents &&
      size / tensors % (plan.channels * plan.inner) == 0;
  if (!fits) {
    return InvalidArgument("mx_jax statistics: channels and exponents must be of ", tensors,
                           " tensors with ", plan.channels, " channels, got channels.shape=",
                           Shape(channels->dimensions()), ", exponents.shape=",
                           Shape(exponents->dimensions()), " for x.shape=", Shape(shape));
  }
  const Scratch values(static_cast<size_t>(size) * sizeof(float));
  coded.type = FloatType::kF32;
  coded.out = values.data();
  DequantizeBlocks(pool, size, coded, ChosenDequantizeKernels());
  plan.x = x.untyped_data();
  plan.codes = coded.codes;
  plan.values = reinterpret_cast<const float*>(values.data());
  plan.element = coded.element;
  const Results results{channels->typed_data(),   amax->typed_data(),
                        exponents->typed_data(),  underflow->typed_data(),
                        saturated->typed_data(),  bad_blocks->typed_data(),
                        signal->typed_data(),     noise->typed_data()};
  const int64_t num_blocks = static_cast<int64_t>(scales.element_count()) / tensors;
  for (int64_t number = 0; number < tensors; ++number) {
    Gather(pool, Tensor{plan, coded, number, size / tensors, num_blocks}, results);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxCastStatistics, mx::CastStatistics,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attrs());
