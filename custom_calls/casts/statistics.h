// What the kernels of a cast's statistics are given, and the table of them for each instruction set.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_STATISTICS_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_STATISTICS_H_

#include <stdint.h>

#include "common/float_types.h"
#include "common/element_codec.h"
#include "common/isas.h"

namespace mx {

// Elements that are taken together. Squares are summed in as many sums, one for each place in a tile:
// compilers make vectors of these, and the order of the sums is the same for all of them.
constexpr int64_t kStatisticLanes = 256;

// Values and what they became, as `[outer, channels, inner]`.
struct StatisticsPlan {
  const void* x;
  FloatType type;
  const uint8_t* codes;
  const float* values;  // of the codes
  int64_t channels;
  int64_t inner;
  ElementFormat element;
};

// Of some elements; in their order, whichever thread counts them.
struct StatisticsTotals {
  uint32_t amax;  // pattern of the largest finite magnitude
  int64_t underflow;
  int64_t saturated;
  int64_t nonfinite;
  double signal[kStatisticLanes];  // squares of values, where these and what they became are finite
  double noise[kStatisticLanes];   // squares of what the cast changed
};

struct StatisticsKernels {
  // Runs begin..end - 1, of the channels' elements where inner is 1, else of inner elements; adds to
  // totals, and to the amax of each channel, a pattern.
  void (*runs)(const StatisticsPlan& plan, int64_t begin, int64_t end, uint32_t* channels,
               StatisticsTotals* totals);
};

// Of statistics_kernels.cc, compiled for each set.
MX_DECLARE_KERNELS(StatisticsKernels, kStatistics)

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_STATISTICS_H_
