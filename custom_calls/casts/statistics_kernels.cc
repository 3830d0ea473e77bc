// The kernels of a cast's statistics, compiled for each instruction set: see common/target.h. In plain
// C++, which compilers turn into vectors: short loops over a tile that stays in the first cache, each
// with one kind of arithmetic.
#include "casts/statistics.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

constexpr int64_t kTile = kStatisticLanes;

// A tile of values and what they became, in float32.
struct Tile {
  uint32_t x[kTile];
  uint32_t values[kTile];
};

// What finite codes stand for stays finite: only codes of Inf are Inf.
template <class T>
MX_INLINE void FillTile(const T* x, const float* values, const uint8_t* codes, int64_t n,
                        const ElementFormat& element, Tile* tile) {
  for (int64_t i = 0; i < n; ++i) tile->x[i] = BitsOf(Widen(x[i]));
  const uint32_t half = element.sign_code - 1, inf = element.inf_code;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = BitsOf(values[i]), code = codes[i];
    // Inf is one more than the largest.
    const uint32_t too_large = ((bits & kAbs) == kInf) & ((code & half) != inf);
    tile->values[i] = bits - too_large;
  }
}

MX_INLINE uint32_t FiniteSize(uint32_t bits) {
  const uint32_t size = bits & kAbs;
  return size & (0 - static_cast<uint32_t>(size < kInf));
}

// Everything that is counted, and the largest magnitude.
template <bool kInteger>
MX_INLINE uint32_t Count(const Tile& tile, const uint8_t* codes, int64_t n,
                         const ElementFormat& element, StatisticsTotals* totals) {
  const uint32_t sign = element.sign_code, mask = sign - 1, limit = element.max_code;
  uint32_t amax = 0, underflow = 0, saturated = 0, nonfinite = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = tile.x[i] & kAbs, value = tile.values[i] & kAbs, code = codes[i];
    const uint32_t low = code & mask;
    const uint32_t half = kInteger && (code & sign) != 0 ? sign - low : low;
    const uint32_t finite = FiniteSize(size);
    amax = amax < finite ? finite : amax;
    nonfinite += static_cast<uint32_t>(size >= kInf);
    underflow += static_cast<uint32_t>((size != 0) & (value == 0));
    saturated += static_cast<uint32_t>((half >= limit) & (size <= kInf) & (size > value));
  }
  totals->nonfinite += nonfinite;
  totals->underflow += underflow;
  totals->saturated += saturated;
  return amax;
}

// Squares in double: none is too large or too small for it, and each is exact.
MX_INLINE void AddSquares(const Tile& tile, int64_t n, StatisticsTotals* totals) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = tile.x[i], value = tile.values[i];
    const uint32_t both = ((x & kAbs) < kInf) & ((value & kAbs) < kInf);
    const double before = FloatOf(x & (0 - both)), after = FloatOf(value & (0 - both));
    totals->signal[i] += before * before;
    totals->noise[i] += (before - after) * (before - after);
  }
}

template <bool kInteger, class T>
void Run(const StatisticsPlan& plan, int64_t start, int64_t n, uint32_t* channels,
         StatisticsTotals* totals) {
  Tile tile;
  for (int64_t first = 0; first < n; first += kTile) {
    const int64_t count = n - first < kTile ? n - first : kTile, place = start + first;
    const uint8_t* codes = plan.codes + place;
    FillTile(static_cast<const T*>(plan.x) + place, plan.values + place, codes, count, plan.element,
             &tile);
    const uint32_t amax = Count<kInteger>(tile, codes, count, plan.element, totals);
    totals->amax = totals->amax < amax ? amax : totals->amax;
    AddSquares(tile, count, totals);
    if (plan.inner != 1) {
      *channels = *channels < amax ? amax : *channels;
      continue;
    }
    uint32_t* largest = channels + first;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t size = FiniteSize(tile.x[i]);
      largest[i] = largest[i] < size ? size : largest[i];
    }
  }
}

template <bool kInteger, class T>
void RunsOf(const StatisticsPlan& plan, int64_t begin, int64_t end, uint32_t* channels,
            StatisticsTotals* totals) {
  const int64_t n = plan.inner == 1 ? plan.channels : plan.inner;
  for (int64_t run = begin; run < end; ++run) {
    uint32_t* largest = plan.inner == 1 ? channels : channels + run % plan.channels;
    Run<kInteger, T>(plan, run * n, n, largest, totals);
  }
}

void Runs(const StatisticsPlan& plan, int64_t begin, int64_t end, uint32_t* channels,
          StatisticsTotals* totals) {
  ByType(plan.type, [&](auto x) {
    plan.element.is_integer ? RunsOf<true, decltype(x)>(plan, begin, end, channels, totals)
                            : RunsOf<false, decltype(x)>(plan, begin, end, channels, totals);
  });
}

}  // namespace
const StatisticsKernels kStatistics = {Runs};

}  // namespace mx::MX_TARGET
