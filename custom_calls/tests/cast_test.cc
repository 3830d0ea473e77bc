// Quantizing and dequantizing kernels of every instruction set of this machine, on random shapes and
// bit patterns, against one element at a time.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "casts/dequantize.h"
#include "casts/geometry.h"
#include "casts/quantize.h"
#include "common/float_environment.h"
#include "tests/cast_draw.h"
#include "tests/check.h"

namespace {

using mx::FloatType;
using mx_test::Case;
using mx_test::Random;
using mx_test::Widen;

// The code of an element under its block's scale.
uint8_t PlainCode(const Case& test, int64_t index, const mx::BlockScale& scale) {
  const mx::QuantizePlan& plan = test.plan;
  if (scale.is_nan) return static_cast<uint8_t>(std::max(plan.element.nan_code, 0));
  const float x = Widen(test.patterns[index], plan.type);
  const bool divides = plan.rule.kind == mx::ScaleFormatKind::kMultiplier;
  const float y = divides ? x / scale.factor : x * scale.factor;
  const uint32_t drawn =
      plan.random_bits == nullptr ? 0 : static_cast<uint32_t>(plan.random_bits[index]);
  return mx::Encode(mx::BitsOf(y), plan.element, plan.rounding, plan.num_random_bits, drawn);
}

// The bits of a code's value under its block's stored scale.
uint32_t PlainValue(const mx::DequantizePlan& plan, uint8_t code, uint32_t stored,
                    const float* tensor) {
  float scale = mx::FloatOf(stored);
  if (plan.kind == mx::ScaleFormatKind::kExponent) scale = mx::DecodeE8m0(stored);
  if (plan.kind == mx::ScaleFormatKind::kElement) {
    scale = plan.scale_values[stored];
    if (tensor != nullptr) scale = *tensor * scale;
  }
  const float value = mx::Decode(code, plan.element);
  const float wanted =
      plan.kind == mx::ScaleFormatKind::kDivisor ? value / scale : value * scale;
  return wanted != wanted ? mx::kNan : mx::BitsOf(wanted);
}

// The tensor scale of an outer index, or nullptr.
const float* TensorScaleOf(const mx::QuantizePlan& plan, int64_t outer) {
  if (plan.tensor_scales == nullptr) return nullptr;
  return plan.tensor_scales + outer / (plan.outer / plan.num_tensor_scales);
}

struct Expected {
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scales;
};

// What the scalar codecs give, in the plainest loops.
Expected Plainly(const Case& test) {
  const mx::QuantizePlan& plan = test.plan;
  Expected expected;
  expected.codes.resize(test.size);
  for (int64_t o = 0; o < plan.outer; ++o) {
    for (int64_t b = 0; b < plan.blocks_per_row; ++b) {
      const int64_t last = std::min(plan.length, (b + 1) * plan.block);
      for (int64_t j = 0; j < plan.inner; ++j) {
        uint32_t amax = 0;
        for (int64_t i = b * plan.block; i < last; ++i) {
          const int64_t at = (o * plan.length + i) * plan.inner + j;
          amax = std::max(amax, mx::BitsOf(Widen(test.patterns[at], plan.type)) & mx::kAbs);
        }
        const mx::BlockScale scale = mx::ScaleOf(amax, plan.rule, TensorScaleOf(plan, o));
        expected.scales.push_back(scale.stored);
        for (int64_t i = b * plan.block; i < last; ++i) {
          const int64_t at = (o * plan.length + i) * plan.inner + j;
          expected.codes[at] = PlainCode(test, at, scale);
        }
      }
    }
  }
  return expected;
}

uint32_t ScaleAt(const Case& test, int64_t index) {
  if (test.scale_bytes == test.num_scales) return test.scales[index];
  uint32_t bits;
  std::memcpy(&bits, &test.scales[4 * index], 4);
  return bits;
}

// Runs blocks in two parts, cut anywhere.
template <class Plan, class Kernels>
void Run(const Plan& plan, const Kernels& kernels, uint64_t seed) {
  const bool rows = plan.inner == 1;
  const int64_t tiles = rows ? 1 : mx::CeilDivide(plan.inner, mx::kColumnTile);
  const int64_t units = plan.outer * plan.blocks_per_row * tiles;
  const int64_t cut = Random(seed + 99).Below(units + 1);
  auto run = rows ? kernels.rows : kernels.columns;
  run(plan, 0, cut);
  run(plan, cut, units);
}

bool CompareCodes(const Case& test, const Expected& expected) {
  bool same = true;
  for (int64_t i = 0; i < test.size; ++i) same &= CHECK_EQUAL(test.codes[i], expected.codes[i]);
  for (int64_t i = 0; i < test.num_scales; ++i) {
    same &= CHECK_EQUAL(ScaleAt(test, i), expected.scales[i]);
  }
  return same;
}

// Both directions at once, in two parts.
void CompareBoth(uint64_t seed, const mx::QuantizeKernels& quantize) {
  mx::KeepSubnormals environment;
  const Case columns = mx_test::DrawCase(seed, mx_test::DrawColumns);
  const Case rows = mx_test::DrawRowsOf(columns, seed);
  const int64_t strips = columns.plan.outer * columns.plan.blocks_per_row *
                         mx::CeilDivide(columns.plan.inner, mx::StripColumns(rows.plan));
  const int64_t cut = Random(seed + 99).Below(strips + 1);
  quantize.both(rows.plan, columns.plan, 0, cut);
  quantize.both(rows.plan, columns.plan, cut, strips);
  const bool same =
      CompareCodes(rows, Plainly(rows)) & CompareCodes(columns, Plainly(columns));
  if (!same) std::printf("  both ways, seed %llu\n", static_cast<unsigned long long>(seed));
}

// The index of the scale of an element.
int64_t SquareOf(const mx::QuantizePlan& plan, int64_t index) {
  const int64_t row = index / plan.length;
  const int64_t square_row = row / plan.rows * mx::CeilDivide(plan.rows, plan.block_rows) +
                             row % plan.rows / plan.block_rows;
  return square_row * plan.blocks_per_row + index % plan.length / plan.block;
}

// Two-dimensional blocks, there and back.
void CompareSquares(uint64_t seed, const mx::QuantizeKernels& quantize,
                    const mx::DequantizeKernels& dequantize) {
  mx::KeepSubnormals environment;
  const Case test = mx_test::DrawCase(seed ^ 0x3333, mx_test::DrawSquares);
  const mx::QuantizePlan& plan = test.plan;
  quantize.squares(plan, 0, test.num_scales / 2);
  quantize.squares(plan, test.num_scales / 2, test.num_scales);
  std::vector<uint32_t> amax(test.num_scales, 0);
  for (int64_t i = 0; i < test.size; ++i) {
    uint32_t& largest = amax[SquareOf(plan, i)];
    largest = std::max(largest, mx::BitsOf(Widen(test.patterns[i], plan.type)) & mx::kAbs);
  }
  const auto values = std::make_unique<float[]>(test.size);
  const mx::DequantizePlan back = mx_test::Back(plan, FloatType::kF32, values.get());
  dequantize.squares(back, 0, test.num_scales);
  bool same = true;
  for (int64_t i = 0; i < test.size; ++i) {
    const int64_t square = SquareOf(plan, i);
    const float* tensor = TensorScaleOf(plan, i / (plan.rows * plan.length));
    const mx::BlockScale scale = mx::ScaleOf(amax[square], plan.rule, tensor);
    same &= CHECK_EQUAL(ScaleAt(test, square), scale.stored);
    same &= CHECK_EQUAL(test.codes[i], PlainCode(test, i, scale));
    const uint32_t value = PlainValue(back, test.codes[i], scale.stored, tensor);
    same &= CHECK_EQUAL(mx::BitsOf(values[i]), value);
  }
  if (!same) std::printf("  squares, seed %llu\n", static_cast<unsigned long long>(seed));
}

// `kernels` on a case, against the plain loops; then the way back, against the values of the codes.
void Compare(uint64_t seed, const mx::QuantizeKernels& quantize,
             const mx::DequantizeKernels& dequantize) {
  mx::KeepSubnormals environment;
  const Case test = mx_test::DrawCase(seed, mx_test::DrawPlace);
  const Expected expected = Plainly(test);
  Run(test.plan, quantize, seed);
  bool same = CompareCodes(test, expected);
  const mx::QuantizePlan& plan = test.plan;
  const auto values = std::make_unique<float[]>(test.size);
  mx::DequantizePlan back = mx_test::Back(plan, FloatType::kF32, values.get());
  // Codes that no cast leaves under an ordinary scale too, such as NaN.
  std::vector<uint8_t> codes = expected.codes;
  for (size_t i = seed % 7; i < codes.size(); i += 61) {
    codes[i] = static_cast<uint8_t>((i * 37 + seed) % (2 * plan.element.sign_code));
  }
  back.codes = codes.data();
  Run(back, dequantize, seed);
  for (int64_t i = 0; i < test.size; ++i) {
    const int64_t j = i % plan.inner, row = i / plan.inner;
    const int64_t o = row / plan.length, b = row % plan.length / plan.block;
    const int64_t block = (o * plan.blocks_per_row + b) * plan.inner + j;
    const uint32_t value =
        PlainValue(back, codes[i], expected.scales[block], TensorScaleOf(plan, o));
    same &= CHECK_EQUAL(mx::BitsOf(values[i]), value);
  }
  if (!same) std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
}

}  // namespace

// cast_test [cases [first seed]]
int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 300;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  mx_test::ForEachSet([&](const char* set, const auto& quantize, const auto& dequantize) {
    for (int64_t i = 0; i < cases; ++i) {
      Compare(first + i, quantize, dequantize);
      CompareBoth(first + i, quantize);
      CompareSquares(first + i, quantize, dequantize);
    }
    std::printf("%s: %lld cases of each kind\n", set, static_cast<long long>(cases));
  });
  return mx_test::Report();
}
