// Each set of instructions makes the codes and scales of moments that the others make.
#include <cmath>
#include <cstdint>
#include <vector>

#include "casts/moments.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "tests/check.h"

namespace mx {
namespace {

using mx_test::Random;

struct Moments {
  std::vector<uint8_t> codes, scales;
};

// Blocks of a moment, or of its root, and what is added to it, of like magnitude.
struct Draw {
  Moments own;
  std::vector<float> added;
};

Draw DrawBlocks(Random& random, int blocks, bool is_root, bool is_square) {
  Draw drawn;
  for (int block = 0; block < blocks; ++block) {
    int scale = static_cast<int>(100 + random.Below(40));
    if (random.Below(8) == 0) {
      scale = static_cast<int>(is_root ? 56 + random.Below(128) : 1 + random.Below(247));
    }
    if (random.Below(40) == 0) scale = 255;
    drawn.own.scales.push_back(static_cast<uint8_t>(scale));
    const int exponent = (is_root && !is_square ? 2 : 1) * (scale - 127);
    const float most = std::ldexp(1.0f, exponent + static_cast<int>(random.Below(20)) - 10);
    for (int i = 0; i < kMomentBlock; ++i) {
      const int64_t code =
          is_root ? 8 + random.Below(119) : random.Below(127) | random.Below(2) << 7;
      drawn.own.codes.push_back(static_cast<uint8_t>(code));
      float value = most * (static_cast<float>(random.Below(20001)) - 10000) / 10000;
      if (is_root && !is_square) value = std::fabs(value);
      const int64_t special = random.Below(2000);
      drawn.added.push_back(special == 0   ? NAN
                            : special == 1 ? INFINITY
                            : special < 20 ? 0.0f
                            : special < 30 ? 1e-40f
                                           : value);
    }
  }
  return drawn;
}

Moments StepBy(const MomentKernels& kernels, MomentPlan plan, int blocks, int split) {
  Moments found{std::vector<uint8_t>(blocks * kMomentBlock), std::vector<uint8_t>(blocks)};
  plan.out_codes = found.codes.data(), plan.out_scales = found.scales.data();
  kernels.step(plan, 0, split);
  kernels.step(plan, split, blocks);
  return found;
}

void SetsAgree() {
  static const MomentKernels* const kKernels[kNumIsas] = MX_KERNELS(kMoments);
  Random random(5);
  int64_t apart = 0, elements = 0;
  for (int round = 0; round < 2000; ++round) {
    const int blocks = static_cast<int>(1 + random.Below(40));
    const int split = static_cast<int>(random.Below(blocks + 1));
    const bool is_root = random.Below(2), is_square = random.Below(2);
    const Draw drawn = DrawBlocks(random, blocks, is_root, is_square);
    MomentPlan plan{};
    plan.codes = drawn.own.codes.data(), plan.scales = drawn.own.scales.data();
    plan.added = drawn.added.data();
    plan.keep = round % 6 == 1 ? 0.0f : 0.9f, plan.add = round % 6 == 2 ? 1.0f : 0.1f;
    plan.is_root = is_root, plan.is_square = is_square;
    plan.words[0] = random.Bits(), plan.words[1] = random.Bits();
    const Moments best = StepBy(Pick(kKernels), plan, blocks, split);
    const MomentKernels* last = nullptr;
    for (int isa = 0; isa <= DetectedIsa(); ++isa) {
      if (kKernels[isa] == nullptr || kKernels[isa] == last) continue;
      last = kKernels[isa];
      const Moments own = StepBy(*last, plan, blocks, blocks - split);
      // The portable set rounds a product before it is added, where the others do not; and below
      // 2^-126, which scales up to 80 reach, flushes it.
      const bool is_fused = isa > 0 || DetectedIsa() == 0;
      for (int block = 0; block < blocks; ++block) {
        const int scale = own.scales[block], other = best.scales[block];
        CHECK_EQUAL(is_fused ? scale == other : std::abs(scale - other) <= 1, true);
        if (other == 255 || scale != other || (!is_fused && other <= 80)) continue;
        for (int i = block * kMomentBlock; i < (block + 1) * kMomentBlock; ++i) {
          const int near = std::abs((own.codes[i] & 0x7f) - (best.codes[i] & 0x7f));
          CHECK_EQUAL(is_fused ? own.codes[i] == best.codes[i] : near <= 1, true);
          apart += own.codes[i] != best.codes[i], ++elements;
        }
      }
    }
  }
  CHECK_EQUAL(apart * 200 < elements, true);
}

// The largest moment that float32 holds stays a number.
void TheLargestMomentStays() {
  static const MomentKernels* const kKernels[kNumIsas] = MX_KERNELS(kMoments);
  std::vector<uint8_t> codes(kMomentBlock), scales{247};
  std::vector<float> added(kMomentBlock);
  codes[1] = 0x77;  // 1.875 * 2^7, times 2^120
  MomentPlan plan{};
  plan.codes = codes.data(), plan.scales = scales.data(), plan.added = added.data();
  plan.keep = 0.5f, plan.add = 0.5f;
  for (int isa = 0; isa <= DetectedIsa(); ++isa) {
    if (kKernels[isa] == nullptr) continue;
    CHECK_EQUAL(StepBy(*kKernels[isa], plan, 1, 1).scales[0] < 248, true);
  }
}

}  // namespace
}  // namespace mx

int main() {
  mx::SetsAgree();
  mx::TheLargestMomentStays();
  return mx_test::Report();
}
