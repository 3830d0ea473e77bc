// Random casts for the tests of the kernels: arrays of any bit patterns, and where results go.
#ifndef MX_JAX_CUSTOM_CALLS_TESTS_CAST_DRAW_H_
#define MX_JAX_CUSTOM_CALLS_TESTS_CAST_DRAW_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <vector>

#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "products/elements.h"
#include "tests/check.h"

namespace mx_test {

// The formats of mx_jax.formats, for tests of every one of them.
struct Named {
  const char* name;
  mx::ElementFacts facts;
};

// exponent bits, mantissa bits, bias, reserved codes, Inf, integer, negative zero, code below -max.
#define MX_NAMED(element, name, ...) {name, __VA_ARGS__},
inline const Named kFormats[] = {
    MX_ELEMENTS(MX_NAMED){"int8_full", {1, 6, 1, 0, 0, 1, 0, 1}},
    {"e4m3fnuz", {4, 3, 8, 0, 0, 0, 0, 0}},
    {"e5m2fnuz", {5, 2, 16, 0, 0, 0, 0, 0}},
};
#undef MX_NAMED

using mx::FloatType;
using mx::Rounding;

inline float Widen(uint32_t bits, FloatType type) {
  if (type == FloatType::kF32) return mx::FloatOf(bits);
  if (type == FloatType::kBf16) return mx::FloatOf(bits << 16);
  const uint32_t magnitude = bits & 0x7fff;
  const float value = magnitude >= 0x7c00
                          ? mx::FloatOf(mx::kInf | magnitude << 13)
                          : mx::FloatOf(magnitude << 13) * mx::FloatOf((127u + 112u) << 23);
  return bits & 0x8000 ? -value : value;
}

// Memory that begins with a line, as XLA's does.
struct FreeLines {
  void operator()(uint8_t* data) const { ::operator delete[](data, std::align_val_t(64)); }
};
using Lines = std::unique_ptr<uint8_t[], FreeLines>;
inline Lines MakeLines(int64_t size) {
  return Lines(static_cast<uint8_t*>(::operator new[](size, std::align_val_t(64))));
}

// A random cast; arrays end where their memory ends, so that sanitizers see every step too far.
struct Case {
  mx::QuantizePlan plan{};
  std::vector<uint32_t> patterns;  // of the input
  std::unique_ptr<uint8_t[]> x, scales;
  Lines codes;
  std::vector<int32_t> random_bits;
  std::vector<float> tensor_scales;
  int64_t size = 0, num_scales = 0, scale_bytes = 0;
};

inline void PutValue(Case& test, uint32_t bits) {
  const int64_t width = mx::SizeOf(test.plan.type), i = static_cast<int64_t>(test.patterns.size());
  if (width == 2) bits >>= 16;
  test.patterns.push_back(bits);
  std::memcpy(&test.x[i * width], &bits, width);
}

// Any patterns, or mostly ordinary numbers, tiny ones, or zeros.
inline void DrawValues(Random& random, Case& test) {
  const int kind = static_cast<int>(random.Below(4));
  for (int64_t i = 0; i < test.size; ++i) {
    uint32_t bits = random.Bits();
    if (kind == 1 && random.Below(64) != 0) bits = (bits & 0x80ffffff) | 0x3f000000;
    if (kind == 2) bits &= 0x80ffffff;
    if (kind == 3 && random.Below(8) != 0) bits = 0;
    PutValue(test, bits);
  }
}

inline void DrawRule(Random& random, mx::QuantizePlan& plan) {
  plan.rule.emax = plan.element.emax;
  plan.rule.target = mx::MaxOf(plan.element);
  switch (random.Below(6)) {
    case 0:
      plan.rule.kind = mx::ScaleFormatKind::kElement;
      plan.rule.scale_element = mx::Derive(mx_test::kFormats[0].facts);
      plan.rule.smallest = mx::SmallestNormal(plan.rule.scale_element);
      return;
    case 1:
      plan.rule.kind = mx::ScaleFormatKind::kDivisor;
      plan.rule.power_of_two = random.Below(2) == 0;
      plan.rule.smallest = 1e-12f;
      plan.rule.scale_of_tiny = static_cast<float>(double(plan.rule.target) / 1e-12);
      return;
    case 2:
      plan.rule.kind = mx::ScaleFormatKind::kMultiplier;
      return;
    default: {
      const int32_t thresholds[] = {1 << 23, 1, (1 << 23) - (1 << 19), 0x600001};
      plan.rule.kind = mx::ScaleFormatKind::kExponent;
      plan.rule.threshold = thresholds[random.Below(4)];
    }
  }
}

inline int64_t DrawBlock(Random& random) {
  const int64_t blocks[] = {1, 7, 16, 32, 32, 32, 64, 128, 2048};
  return blocks[random.Below(9)];
}

// Roundings, operands and results of a cast whose rule and place are known.
inline void DrawRest(Random& random, Case& test) {
  mx::QuantizePlan& plan = test.plan;
  plan.rounding = random.Below(2) == 0 ? Rounding::kNearest
                                       : static_cast<Rounding>(random.Below(4));
  plan.streams = random.Below(2) == 0;
  test.num_scales = plan.outer * plan.blocks_per_row * plan.inner;
  if (plan.block_rows != 0) test.num_scales *= mx::CeilDivide(plan.rows, plan.block_rows);
  if (plan.rounding == Rounding::kStochastic) {
    plan.num_random_bits = static_cast<int32_t>(1 + random.Below(17));
    for (int64_t i = 0; i < test.size; ++i) {
      test.random_bits.push_back(static_cast<int32_t>(random.Below(1 << plan.num_random_bits)));
    }
    plan.random_bits = test.random_bits.data();
  }
  if (plan.rule.kind == mx::ScaleFormatKind::kElement && random.Below(2) == 0) {
    test.tensor_scales.assign(random.Below(2) == 0 ? 1 : plan.outer, 0.0f);
    for (float& scale : test.tensor_scales) {
      scale = mx::PowerOfTwo(static_cast<int32_t>(random.Below(40)) - 20) * 1.37f;
    }
    plan.tensor_scales = test.tensor_scales.data();
    plan.num_tensor_scales = static_cast<int64_t>(test.tensor_scales.size());
  }
  const bool bytes = plan.rule.kind == mx::ScaleFormatKind::kExponent ||
                     plan.rule.kind == mx::ScaleFormatKind::kElement;
  test.scale_bytes = test.num_scales * (bytes ? 1 : 4);
  test.codes = MakeLines(test.size);
  test.scales = std::make_unique<uint8_t[]>(test.scale_bytes);
  plan.codes = test.codes.get();
  plan.scales = test.scales.get();
}

// A random cast, whose sizes `place` draws.
template <class Place>
Case DrawCase(uint64_t seed, const Place& place,
              void (*draw_values)(Random&, Case&) = DrawValues) {
  Random random(seed);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = mx::Derive(mx_test::kFormats[random.Below(std::size(mx_test::kFormats))].facts);
  DrawRule(random, plan);
  plan.type = static_cast<FloatType>(random.Below(3));
  place(random, plan);
  plan.blocks_per_row = mx::CeilDivide(plan.length, plan.block);
  test.size = plan.outer * std::max<int64_t>(plan.rows, 1) * plan.length * plan.inner;
  test.x = std::make_unique<uint8_t[]>(test.size * mx::SizeOf(plan.type));
  plan.x = test.x.get();
  draw_values(random, test);
  DrawRest(random, test);
  return test;
}

// Rows or columns.
inline void DrawPlace(Random& random, mx::QuantizePlan& plan) {
  plan.outer = 1 + random.Below(5);
  const bool rows = random.Below(2) == 0;
  plan.inner = rows ? 1 : 1 + random.Below(200);
  plan.block = DrawBlock(random);
  plan.length = random.Below(2) == 0 ? plan.block * (1 + random.Below(40) * 32 / plan.block)
                                     : 1 + random.Below(rows ? 1500 : 150);
}

// Usually wide enough for whole tiles, and with usual blocks.
inline void DrawColumns(Random& random, mx::QuantizePlan& plan) {
  plan.outer = 1 + random.Below(3);
  plan.inner = random.Below(3) == 0 ? 1 + random.Below(300) : 64 * (1 + random.Below(11));
  plan.block = random.Below(2) == 0 ? 32 : DrawBlock(random);
  plan.length = random.Below(2) == 0 ? 32 * (1 + random.Below(3)) : 1 + random.Below(100);
}

// Two-dimensional blocks.
inline void DrawSquares(Random& random, mx::QuantizePlan& plan) {
  plan.outer = 1 + random.Below(3);
  plan.inner = 1;
  plan.rows = 1 + random.Below(80);
  plan.length = 1 + random.Below(200);
  plan.block_rows = random.Below(2) == 0 ? 16 : 1 + random.Below(40);
  plan.block = DrawBlock(random);
}

// The same array along its rows, mostly in the same format.
inline Case DrawRowsOf(const Case& columns, uint64_t seed) {
  Random random(seed ^ 0x5555);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = columns.plan.element;
  plan.rule = columns.plan.rule;
  if (random.Below(3) == 0) {
    plan.element = mx::Derive(mx_test::kFormats[random.Below(std::size(mx_test::kFormats))].facts);
    DrawRule(random, plan);
  }
  plan.type = columns.plan.type;
  plan.outer = columns.plan.outer * columns.plan.length;
  plan.length = columns.plan.inner;
  plan.inner = 1;
  plan.block = random.Below(2) == 0 ? 32 : DrawBlock(random);
  plan.blocks_per_row = mx::CeilDivide(plan.length, plan.block);
  test.size = columns.size;
  test.patterns = columns.patterns;
  plan.x = columns.plan.x;
  DrawRest(random, test);
  return test;
}

// The way back from what `plan` writes.
inline mx::DequantizePlan Back(const mx::QuantizePlan& plan, FloatType type, void* out) {
  mx::DequantizePlan back{};
  back.codes = plan.codes, back.scales = plan.scales, back.out = out, back.type = type;
  back.tensor_scales = plan.tensor_scales, back.num_tensor_scales = plan.num_tensor_scales;
  back.outer = plan.outer, back.length = plan.length, back.inner = plan.inner;
  back.block = plan.block, back.blocks_per_row = plan.blocks_per_row;
  back.rows = plan.rows, back.block_rows = plan.block_rows;
  mx::SetFormat(plan.element, plan.rule.kind, plan.rule.scale_element, &back);
  return back;
}

// Calls run(name, quantize, dequantize) with the kernels of each set of casts that this machine has.
template <class Run>
void ForEachSet(const Run& run) {
  run("portable", mx::portable::kQuantize, mx::portable::kDequantize);
#if MX_X86
  if (mx::DetectedIsa() >= mx::kAvx2) run("avx2", mx::avx2::kQuantize, mx::avx2::kDequantize);
  if (mx::DetectedIsa() < mx::kAvx512) return;
  run("avx512", mx::avx512::kQuantize, mx::avx512::kDequantize);
  if (mx::HasVbmi()) run("vbmi", mx::avx512_vbmi::kQuantize, mx::avx512::kDequantize);
#endif
}

}  // namespace mx_test

#endif  // MX_JAX_CUSTOM_CALLS_TESTS_CAST_DRAW_H_
