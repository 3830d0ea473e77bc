// No cast has a subnormal operand of codes, or of values that are normal: subnormal.h.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "casts/share.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "tests/cast_draw.h"

#if MX_X86
#include "tests/subnormal.h"

namespace {

using mx_test::Case;
using mx_test::kSubnormalOperand;
using mx_test::Random;
using mx_test::StaysNormal;
using mx_test::Threads;

// Values of ordinary size, all that float16 has, or zeros: runs of them, and columns of `inner`.
void DrawOrdinary(Random& random, Case& test) {
  const int64_t inner = test.plan.inner;
  bool zero = false;
  for (int64_t i = 0; i < test.size; ++i) {
    if (i % 64 == 0) zero = random.Below(4) == 0;
    uint32_t bits = random.Bits();
    if (test.plan.type == mx::FloatType::kF16) {
      bits &= 0xbfffffff;
    } else {
      bits = (bits & 0x807fffff) | static_cast<uint32_t>(97 + random.Below(60)) << 23;
    }
    PutValue(test, zero || (inner > 1 && i % inner % 5 == 0) ? 0 : bits);
  }
}

// One cast, the largest magnitudes that its tensor scale would take, and the way back.
template <class Place>
void CheckCast(const std::string& name, uint64_t seed, const Place& place,
               const mx::QuantizeKernels& quantize, const mx::DequantizeKernels& dequantize) {
  Case test = mx_test::DrawCase(seed, place, DrawOrdinary);
  const mx::QuantizePlan& plan = test.plan;
  StaysNormal(name + "quantize", kSubnormalOperand,
              [&](Threads& threads) { mx::ShareBlocks(threads, plan, quantize); });
  StaysNormal(name + "amax", kSubnormalOperand, [&](Threads& threads) {
    const int64_t strips = plan.block_rows != 0 ? mx::CeilDivide(plan.rows, plan.block_rows)
                           : plan.inner == 1    ? 1
                                                : plan.blocks_per_row;
    std::vector<int32_t> amax(plan.outer * strips);
    mx::ParallelFor(threads, plan.outer * strips, [&](int64_t run) {
      quantize.amax(plan, run, run + 1, amax.data());
    });
  });
  std::vector<float> values(test.size);
  const mx::DequantizePlan back = mx_test::Back(plan, plan.type, values.data());
  // The codes that quantizing left, and any at all.
  for (const bool drawn : {false, true}) {
    Random random(seed);
    for (int64_t i = 0; drawn && i < test.size; ++i) {
      test.codes[i] = static_cast<uint8_t>(random.Below(2 * plan.element.sign_code));
    }
    // Any codes under the scale of a block of zeros are subnormal values in truth: not so here.
    const bool powers = plan.rule.kind == mx::ScaleFormatKind::kExponent;
    for (int64_t i = 0; drawn && powers && i < test.num_scales; ++i) {
      if (test.scales[i] == 0) test.scales[i] = 100;
    }
    StaysNormal(name + "dequantize", kSubnormalOperand,
                [&](Threads& threads) { mx::ShareBlocks(threads, back, dequantize); });
  }
}

void CheckCasts(const char* set, const mx::QuantizeKernels& quantize,
                const mx::DequantizeKernels& dequantize) {
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    const std::string name = std::string(set) + ", seed " + std::to_string(seed) + ", ";
    CheckCast(name + "blocks: ", seed, mx_test::DrawPlace, quantize, dequantize);
    CheckCast(name + "squares: ", seed, mx_test::DrawSquares, quantize, dequantize);
    const Case columns = mx_test::DrawCase(seed, mx_test::DrawColumns, DrawOrdinary);
    const Case rows = mx_test::DrawRowsOf(columns, seed);
    StaysNormal(name + "both", kSubnormalOperand, [&](Threads& threads) {
      mx::ShareStrips(threads, rows.plan, columns.plan, quantize);
    });
  }
}

// The flag works at all, and comes through from every thread that ParallelFor uses.
void CheckFlag() {
  for (int64_t guilty = 0; guilty < 3; ++guilty) {
    const unsigned flags = mx_test::FlagsOf([&](Threads& threads) {
      std::atomic<int64_t> waiting{0};
      mx::ParallelFor(threads, 3, [&](int64_t task) {
        ++waiting;
        while (waiting < 3) std::this_thread::yield();
        volatile float tiny = 1e-40f;
        if (task == guilty) tiny = tiny * 2.0f;
      });
    });
    CHECK_EQUAL(flags & kSubnormalOperand, kSubnormalOperand);
  }
}

}  // namespace

int main() {
  CheckFlag();
  mx_test::ForEachSet(CheckCasts);
  return mx_test::Report();
}
#else
int main() { return 0; }
#endif
