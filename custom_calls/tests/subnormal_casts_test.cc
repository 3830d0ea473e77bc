// No cast has a subnormal operand of codes, or of values that are normal: subnormal.h.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "casts/share.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "tests/cast_draw.h"

#if MX_X86
#include "tests/subnormal.h"

namespace {

using mx_test::FlagThreads;
using mx_test::kAllFlags;
using mx_test::kSubnormalOperand;
using mx_test::Random;
using mx_test::StaysNormal;

// A cast's shape, and where its blocks lie.
struct Place {
  int64_t outer, rows, length, inner, block, block_rows;
};

constexpr Place kPlaces[] = {
    {7, 1, 320, 1, 32, 0},  {7, 1, 300, 1, 32, 0},   {3, 1, 96, 150, 32, 0}, {2, 1, 70, 64, 16, 0},
    {5, 1, 320, 1, 320, 0}, {2, 48, 200, 1, 32, 16}, {2, 1, 64, 1, 16, 0},
};

template <class Plan>
void Put(const Place& place, Plan* plan) {
  plan->outer = place.outer, plan->rows = place.rows, plan->length = place.length;
  plan->inner = place.inner, plan->block = place.block, plan->block_rows = place.block_rows;
  plan->blocks_per_row = mx::CeilDivide(place.length, place.block);
}

int64_t SizeOf(const Place& place) {
  return place.outer * place.rows * place.length * place.inner;
}

int64_t NumScales(const Place& place) {
  const int64_t squares =
      place.block_rows == 0 ? 1 : mx::CeilDivide(place.rows, place.block_rows);
  return place.outer * squares * mx::CeilDivide(place.length, place.block) * place.inner;
}

mx::ScaleRule RuleOf(mx::ScaleFormatKind kind, const mx::ElementFormat& element) {
  mx::ScaleRule rule{};
  rule.kind = kind, rule.threshold = 1 << 23, rule.emax = element.emax;
  rule.target = mx::MaxOf(element);
  rule.scale_element = mx::Derive(mx_test::kFormats[0].facts);
  rule.smallest = kind == mx::ScaleFormatKind::kDivisor ? 1e-12f
                                                        : mx::SmallestSubnormal(rule.scale_element);
  rule.scale_of_tiny = static_cast<float>(double(rule.target) / 1e-12);
  return rule;
}

// Values of ordinary size, all that float16 has, or zeros: runs of them, and columns of `inner`.
std::vector<uint8_t> DrawInput(Random& random, mx::FloatType type, int64_t size, int64_t inner) {
  const int64_t width = type == mx::FloatType::kF32 ? 4 : 2;
  std::vector<uint8_t> x(size * width);
  bool zero = false;
  for (int64_t i = 0; i < size; ++i) {
    if (i % 64 == 0) zero = random.Below(4) == 0;
    uint32_t bits = random.Bits();
    if (type == mx::FloatType::kF16) {
      bits &= 0xbfff;
    } else {
      bits = (bits & 0x807fffff) | static_cast<uint32_t>(97 + random.Below(60)) << 23;
      if (type == mx::FloatType::kBf16) bits >>= 16;
    }
    if (zero || (inner > 1 && i % inner % 5 == 0)) bits = 0;
    std::memcpy(&x[i * width], &bits, width);
  }
  return x;
}

std::string NameOf(const char* what, const std::string& isa, const char* format,
                   mx::ScaleFormatKind kind, mx::FloatType type, const Place& place) {
  return isa + ": " + what + " " + format + ", scale kind " +
         std::to_string(static_cast<int>(kind)) + ", type " +
         std::to_string(static_cast<int>(type)) + ", length " + std::to_string(place.length) +
         ", inner " + std::to_string(place.inner);
}

void CheckCasts(const mx::QuantizeKernels& quantize, const mx::DequantizeKernels& dequantize,
                const std::string& isa, const mx_test::Named& format, mx::ScaleFormatKind kind,
                mx::FloatType type, const Place& place) {
  Random random(static_cast<uint64_t>(place.length + 10 * static_cast<int>(type)));
  const int64_t size = SizeOf(place), scales = NumScales(place);
  const std::vector<uint8_t> x = DrawInput(random, type, size, place.inner);
  std::vector<uint8_t> codes(size), stored(4 * scales), values(4 * size);
  std::vector<int32_t> amax(std::max(scales, place.outer));
  mx::QuantizePlan plan{};
  Put(place, &plan);
  plan.x = x.data(), plan.type = type, plan.codes = codes.data(), plan.scales = stored.data();
  plan.element = mx::Derive(format.facts), plan.rule = RuleOf(kind, plan.element);
  StaysNormal(NameOf("quantize", isa, format.name, kind, type, place), kSubnormalOperand,
              [&](FlagThreads& threads) { mx::ShareBlocks(threads, plan, quantize); });
  StaysNormal(NameOf("amax", isa, format.name, kind, type, place), kSubnormalOperand,
              [&](FlagThreads& threads) {
                const int64_t strips =
                    place.block_rows != 0
                        ? (place.rows + place.block_rows - 1) / place.block_rows
                        : place.inner == 1 ? 1 : plan.blocks_per_row;
                mx::ParallelFor(threads, place.outer * strips, [&](int64_t run) {
                  quantize.amax(plan, run, run + 1, amax.data());
                });
              });
  // The codes that quantizing left, and any at all.
  for (const bool drawn : {false, true}) {
    for (int64_t i = 0; drawn && i < size; ++i) {
      codes[i] = static_cast<uint8_t>(random.Below(2 * plan.element.sign_code));
    }
    mx::DequantizePlan back{};
    Put(place, &back);
    back.codes = codes.data(), back.scales = stored.data(), back.out = values.data();
    back.type = type;
    mx::SetFormat(plan.element, kind, plan.rule.scale_element, &back);
    // Any codes under the scale of a block of zeros are subnormal values in truth: not so here.
    for (int64_t i = 0; drawn && kind == mx::ScaleFormatKind::kExponent && i < scales; ++i) {
      if (stored[i] == 0) stored[i] = 100;
    }
    StaysNormal(NameOf("dequantize", isa, format.name, kind, type, place), kSubnormalOperand,
                [&](FlagThreads& threads) { mx::ShareBlocks(threads, back, dequantize); });
  }
}

void CheckBoth(const mx::QuantizeKernels& quantize, const std::string& isa,
               const mx_test::Named& format, mx::FloatType type) {
  Random random(5);
  const Place across{3, 1, 64, 200, 32, 0}, along{3 * 64, 1, 200, 1, 32, 0};
  const std::vector<uint8_t> x = DrawInput(random, type, SizeOf(across), across.inner);
  std::vector<uint8_t> codes[2], scales[2];
  mx::QuantizePlan plans[2] = {};
  for (int side = 0; side < 2; ++side) {
    const Place& place = side == 0 ? along : across;
    codes[side].resize(SizeOf(place)), scales[side].resize(NumScales(place));
    Put(place, &plans[side]);
    plans[side].x = x.data(), plans[side].type = type;
    plans[side].codes = codes[side].data(), plans[side].scales = scales[side].data();
    plans[side].element = mx::Derive(format.facts);
    plans[side].rule = RuleOf(mx::ScaleFormatKind::kExponent, plans[side].element);
  }
  StaysNormal(NameOf("both", isa, format.name, mx::ScaleFormatKind::kExponent, type, across),
              kSubnormalOperand, [&](FlagThreads& threads) {
                mx::ShareStrips(threads, plans[0], plans[1], quantize);
              });
}

void CheckAllCasts(const mx::QuantizeKernels& quantize, const mx::DequantizeKernels& dequantize,
                   const std::string& isa) {
  for (const mx_test::Named& format : mx_test::kFormats) {
    for (int type = 0; type < 3; ++type) {
      CheckBoth(quantize, isa, format, static_cast<mx::FloatType>(type));
      for (int kind = 0; kind < 4; ++kind) {
        for (const Place& place : kPlaces) {
          CheckCasts(quantize, dequantize, isa, format, static_cast<mx::ScaleFormatKind>(kind),
                     static_cast<mx::FloatType>(type), place);
        }
      }
    }
  }
}

// The flag works at all, and comes through from every thread that ParallelFor uses.
void CheckFlag() {
  for (int64_t guilty = 0; guilty < 3; ++guilty) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~kAllFlags);
    FlagThreads threads;
    std::atomic<int64_t> waiting{0};
    mx::ParallelFor(threads, 3, [&](int64_t task) {
      ++waiting;
      while (waiting < 3) std::this_thread::yield();
      volatile float tiny = 1e-40f;
      if (task == guilty) tiny = tiny * 2.0f;
    });
    threads.Join();
    const unsigned flags = threads.flags() | (_mm_getcsr() & kAllFlags);
    _mm_setcsr(before);
    CHECK_EQUAL(flags & kSubnormalOperand, kSubnormalOperand);
  }
}

}  // namespace

int main() {
  CheckFlag();
  CheckAllCasts(mx::portable::kQuantize, mx::portable::kDequantize, "portable");
  if (mx::DetectedIsa() >= mx::kAvx2) {
    CheckAllCasts(mx::avx2::kQuantize, mx::avx2::kDequantize, "avx2");
  }
  if (mx::DetectedIsa() >= mx::kAvx512) {
    CheckAllCasts(mx::avx512::kQuantize, mx::avx512::kDequantize, "avx512");
    if (mx::HasVbmi()) CheckAllCasts(mx::avx512_vbmi::kQuantize, mx::avx512::kDequantize, "vbmi");
  }
  return mx_test::Report();
}
#else
int main() { return 0; }
#endif
