// The kernels of a cast's statistics, compiled for each instruction set: see common/target.h.
#include "casts/statistics.h"
#include "casts/statistics-inl.h"
#include "common/target.h"

namespace mx::MX_TARGET {

const StatisticsKernels kStatistics = {Runs};

}  // namespace mx::MX_TARGET
