// Quantizing and dequantizing kernels of every instruction set of this machine, on random shapes and
// bit patterns, against one element at a time.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "common/dispatch.h"
#include "common/float_environment.h"
#include "cpu/dequantize.h"
#include "cpu/geometry.h"
#include "cpu/quantize.h"
#include "tests/check.h"
#include "tests/formats.h"

namespace {

using mx::FloatType;
using mx::Rounding;
using mx_test::Random;

float Widen(uint32_t bits, FloatType type) {
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
Lines MakeLines(int64_t size) {
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
  int64_t size = 0, num_scales = 0, code_bytes = 0, scale_bytes = 0;
};

void DrawValues(Random& random, Case& test) {
  const int64_t width = test.plan.type == FloatType::kF32 ? 4 : 2;
  const int kind = static_cast<int>(random.Below(4));
  test.x = std::make_unique<uint8_t[]>(test.size * width);
  for (int64_t i = 0; i < test.size; ++i) {
    uint32_t bits = random.Bits();
    if (kind == 1 && random.Below(64) != 0) bits = (bits & 0x80ffffff) | 0x3f000000;
    if (kind == 2) bits &= 0x80ffffff;
    if (kind == 3 && random.Below(8) != 0) bits = 0;
    if (width == 2) bits >>= 16;
    test.patterns.push_back(bits);
    std::memcpy(&test.x[i * width], &bits, width);
  }
  test.plan.x = test.x.get();
}

void DrawRule(Random& random, mx::QuantizePlan& plan) {
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

int64_t DrawBlock(Random& random) {
  const int64_t blocks[] = {1, 7, 16, 32, 32, 32, 64, 128, 2048};
  return blocks[random.Below(9)];
}

// Roundings, operands and results of a cast whose rule and place are known.
void DrawRest(Random& random, Case& test);

Case Draw(uint64_t seed) {
  Random random(seed);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = mx::Derive(mx_test::kFormats[random.Below(9)].facts);
  DrawRule(random, plan);
  plan.type = static_cast<FloatType>(random.Below(3));
  plan.outer = 1 + random.Below(5);
  const bool rows = random.Below(2) == 0;
  plan.inner = rows ? 1 : 1 + random.Below(200);
  plan.block = DrawBlock(random);
  plan.length = random.Below(2) == 0 ? plan.block * (1 + random.Below(40) * 32 / plan.block)
                                     : 1 + random.Below(rows ? 1500 : 150);
  plan.blocks_per_row = mx::CeilDivide(plan.length, plan.block);
  test.size = plan.outer * plan.length * plan.inner;
  DrawValues(random, test);
  DrawRest(random, test);
  return test;
}

// The columns of an array: usually wide enough for whole tiles, and with usual blocks.
Case DrawColumns(uint64_t seed) {
  Random random(seed);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = mx::Derive(mx_test::kFormats[random.Below(9)].facts);
  DrawRule(random, plan);
  plan.type = static_cast<FloatType>(random.Below(3));
  plan.outer = 1 + random.Below(3);
  plan.inner = random.Below(3) == 0 ? 1 + random.Below(300) : 64 * (1 + random.Below(11));
  plan.block = random.Below(2) == 0 ? 32 : DrawBlock(random);
  plan.length = random.Below(2) == 0 ? 32 * (1 + random.Below(3)) : 1 + random.Below(100);
  plan.blocks_per_row = mx::CeilDivide(plan.length, plan.block);
  test.size = plan.outer * plan.length * plan.inner;
  DrawValues(random, test);
  DrawRest(random, test);
  return test;
}

// Two-dimensional blocks.
Case DrawSquares(uint64_t seed) {
  Random random(seed ^ 0x3333);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = mx::Derive(mx_test::kFormats[random.Below(9)].facts);
  DrawRule(random, plan);
  plan.type = static_cast<FloatType>(random.Below(3));
  plan.outer = 1 + random.Below(3);
  plan.inner = 1;
  plan.rows = 1 + random.Below(80);
  plan.length = 1 + random.Below(200);
  plan.block_rows = random.Below(2) == 0 ? 16 : 1 + random.Below(40);
  plan.block = DrawBlock(random);
  plan.blocks_per_row = mx::CeilDivide(plan.length, plan.block);
  test.size = plan.outer * plan.rows * plan.length;
  DrawValues(random, test);
  DrawRest(random, test);
  return test;
}

// The same array along its rows, mostly in the same format.
Case DrawRowsOf(const Case& columns, uint64_t seed) {
  Random random(seed ^ 0x5555);
  Case test;
  mx::QuantizePlan& plan = test.plan;
  plan.element = columns.plan.element;
  plan.rule = columns.plan.rule;
  if (random.Below(3) == 0) {
    plan.element = mx::Derive(mx_test::kFormats[random.Below(9)].facts);
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

void DrawRest(Random& random, Case& test) {
  mx::QuantizePlan& plan = test.plan;
  const bool rows = plan.inner == 1;
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
  const int32_t bits = plan.element.bits;
  // What is cast both ways, or in squares, is not packed.
  const bool alone = test.x != nullptr && plan.block_rows == 0;
  const bool packs = alone && rows && bits != 8 && plan.block % mx::CodesPerGroup(bits) == 0 && random.Below(2) == 0;
  plan.row_bytes = packs ? mx::PackedLength(plan.length, bits) : 0;
  const bool bytes = plan.rule.kind == mx::ScaleFormatKind::kExponent ||
                     plan.rule.kind == mx::ScaleFormatKind::kElement;
  test.code_bytes = packs ? plan.outer * plan.row_bytes : test.size;
  test.scale_bytes = test.num_scales * (bytes ? 1 : 4);
  test.codes = MakeLines(test.code_bytes);
  test.scales = std::make_unique<uint8_t[]>(test.scale_bytes);
  plan.codes = test.codes.get();
  plan.scales = test.scales.get();
}

struct Expected {
  std::vector<uint8_t> codes;
  std::vector<uint32_t> scales;
  std::vector<mx::BlockScale> blocks;
};

// What the scalar codecs give, in the plainest loops.
Expected Plainly(const Case& test) {
  const mx::QuantizePlan& plan = test.plan;
  Expected expected;
  expected.codes.resize(test.size);
  const bool divides = plan.rule.kind == mx::ScaleFormatKind::kMultiplier;
  for (int64_t o = 0; o < plan.outer; ++o) {
    const float* tensor =
        plan.tensor_scales == nullptr
            ? nullptr
            : plan.tensor_scales + o / (plan.outer / plan.num_tensor_scales);
    for (int64_t b = 0; b < plan.blocks_per_row; ++b) {
      const int64_t last = std::min(plan.length, (b + 1) * plan.block);
      for (int64_t j = 0; j < plan.inner; ++j) {
        uint32_t amax = 0;
        for (int64_t i = b * plan.block; i < last; ++i) {
          const int64_t at = (o * plan.length + i) * plan.inner + j;
          amax = std::max(amax, mx::BitsOf(Widen(test.patterns[at], plan.type)) & mx::kAbs);
        }
        const mx::BlockScale scale = mx::ScaleOf(amax, plan.rule, tensor);
        expected.scales.push_back(scale.stored);
        expected.blocks.push_back(scale);
        for (int64_t i = b * plan.block; i < last; ++i) {
          const int64_t at = (o * plan.length + i) * plan.inner + j;
          const float x = Widen(test.patterns[at], plan.type);
          const float y = divides ? x / scale.factor : x * scale.factor;
          const uint32_t drawn =
              plan.random_bits == nullptr ? 0 : static_cast<uint32_t>(plan.random_bits[at]);
          expected.codes[at] =
              scale.is_nan ? static_cast<uint8_t>(std::max(plan.element.nan_code, 0))
                           : mx::Encode(mx::BitsOf(y), plan.element, plan.rounding,
                                        plan.num_random_bits, drawn);
        }
      }
    }
  }
  return expected;
}

uint8_t CodeAt(const Case& test, int64_t index) {
  const mx::QuantizePlan& plan = test.plan;
  if (plan.row_bytes == 0) return test.codes[index];
  const int64_t row = index / plan.length, bit = index % plan.length * plan.element.bits;
  const uint8_t* bytes = &test.codes[row * plan.row_bytes + bit / 8];
  const uint32_t high = bit % 8 + plan.element.bits > 8 ? bytes[1] : 0;
  const uint32_t word = (bytes[0] | high << 8) >> (bit % 8);
  return static_cast<uint8_t>(word & (2 * plan.element.sign_code - 1));
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
  for (int64_t i = 0; i < test.size; ++i) same &= CHECK_EQUAL(CodeAt(test, i), expected.codes[i]);
  for (int64_t i = 0; i < test.num_scales; ++i) {
    same &= CHECK_EQUAL(ScaleAt(test, i), expected.scales[i]);
  }
  return same;
}

// Both directions at once, in two parts.
void CompareBoth(uint64_t seed, const mx::QuantizeKernels& quantize) {
  mx::KeepSubnormals environment;
  const Case columns = DrawColumns(seed);
  const Case rows = DrawRowsOf(columns, seed);
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
  const Case test = DrawSquares(seed);
  const mx::QuantizePlan& plan = test.plan;
  quantize.squares(plan, 0, test.num_scales / 2);
  quantize.squares(plan, test.num_scales / 2, test.num_scales);
  std::vector<uint32_t> amax(test.num_scales, 0);
  for (int64_t i = 0; i < test.size; ++i) {
    uint32_t& largest = amax[SquareOf(plan, i)];
    largest = std::max(largest, mx::BitsOf(Widen(test.patterns[i], plan.type)) & mx::kAbs);
  }
  const auto tensor_of = [&plan](int64_t i) {
    const int64_t slice = i / (plan.rows * plan.length);
    return plan.tensor_scales == nullptr
               ? nullptr
               : plan.tensor_scales + slice / (plan.outer / plan.num_tensor_scales);
  };
  mx::DequantizePlan back{};
  back.codes = plan.codes, back.scales = plan.scales;
  back.tensor_scales = plan.tensor_scales, back.num_tensor_scales = plan.num_tensor_scales;
  back.outer = plan.outer, back.length = plan.length, back.inner = 1, back.rows = plan.rows;
  back.block = plan.block, back.block_rows = plan.block_rows;
  back.blocks_per_row = plan.blocks_per_row;
  back.element = plan.element, back.kind = plan.rule.kind;
  back.scale_element = plan.rule.scale_element;
  for (int32_t code = 0; code < 256; ++code) back.values[code] = mx::Decode(code, plan.element);
  auto values = std::make_unique<float[]>(test.size);
  back.out = values.get();
  dequantize.squares(back, 0, test.num_scales);
  bool same = true;
  for (int64_t i = 0; i < test.size; ++i) {
    const float* tensor = tensor_of(i);
    const mx::BlockScale scale = mx::ScaleOf(amax[SquareOf(plan, i)], plan.rule, tensor);
    same &= CHECK_EQUAL(ScaleAt(test, SquareOf(plan, i)), scale.stored);
    const bool divides = plan.rule.kind == mx::ScaleFormatKind::kMultiplier;
    const float x = Widen(test.patterns[i], plan.type);
    const float y = divides ? x / scale.factor : x * scale.factor;
    const uint32_t drawn =
        plan.random_bits == nullptr ? 0 : static_cast<uint32_t>(plan.random_bits[i]);
    const uint32_t nan = static_cast<uint32_t>(std::max(plan.element.nan_code, 0));
    const uint32_t code = scale.is_nan ? nan
                                       : mx::Encode(mx::BitsOf(y), plan.element, plan.rounding,
                                                    plan.num_random_bits, drawn);
    same &= CHECK_EQUAL(test.codes[i], static_cast<uint8_t>(code));
    float factor = mx::FloatOf(scale.stored);
    if (back.kind == mx::ScaleFormatKind::kExponent) factor = mx::DecodeE8m0(scale.stored);
    if (back.kind == mx::ScaleFormatKind::kElement) {
      factor = mx::Decode(scale.stored, back.scale_element);
      if (tensor != nullptr) factor = *tensor * factor;
    }
    const float value = mx::Decode(test.codes[i], plan.element);
    float wanted = back.kind == mx::ScaleFormatKind::kDivisor ? value / factor : value * factor;
    if (wanted != wanted) wanted = mx::FloatOf(mx::kNan);
    same &= CHECK_EQUAL(mx::BitsOf(values[i]), mx::BitsOf(wanted));
  }
  if (!same) std::printf("  squares, seed %llu\n", static_cast<unsigned long long>(seed));
}

// `kernels` on a case, against the plain loops; then the way back, against the values of the codes.
void Compare(uint64_t seed, const mx::QuantizeKernels& quantize,
             const mx::DequantizeKernels& dequantize) {
  mx::KeepSubnormals environment;
  Case test = Draw(seed);
  const Expected expected = Plainly(test);
  Run(test.plan, quantize, seed);
  bool same = CompareCodes(test, expected);
  const mx::QuantizePlan& plan = test.plan;
  mx::DequantizePlan back{};
  back.codes = plan.codes;
  back.scales = plan.scales;
  back.tensor_scales = plan.tensor_scales;
  back.num_tensor_scales = plan.num_tensor_scales;
  back.type = FloatType::kF32;
  back.outer = plan.outer, back.length = plan.length, back.inner = plan.inner;
  back.block = plan.block, back.blocks_per_row = plan.blocks_per_row;
  back.row_bytes = plan.row_bytes;
  back.element = plan.element;
  back.kind = plan.rule.kind;
  back.scale_element = plan.rule.scale_element;
  for (int32_t code = 0; code < 256; ++code) back.values[code] = mx::Decode(code, plan.element);
  auto values = std::make_unique<float[]>(test.size);
  back.out = values.get();
  Run(back, dequantize, seed);
  for (int64_t i = 0; i < test.size; ++i) {
    const int64_t j = i % plan.inner, row = i / plan.inner;
    const int64_t o = row / plan.length, b = row % plan.length / plan.block;
    const int64_t block = (o * plan.blocks_per_row + b) * plan.inner + j;
    const uint32_t stored = expected.scales[block];
    float scale = mx::FloatOf(stored);
    if (back.kind == mx::ScaleFormatKind::kExponent) scale = mx::DecodeE8m0(stored);
    if (back.kind == mx::ScaleFormatKind::kElement) {
      scale = mx::Decode(stored, back.scale_element);
      if (plan.tensor_scales != nullptr) {
        scale = plan.tensor_scales[o / (plan.outer / plan.num_tensor_scales)] * scale;
      }
    }
    const float value = mx::Decode(expected.codes[i], plan.element);
    float wanted = back.kind == mx::ScaleFormatKind::kDivisor ? value / scale : value * scale;
    if (wanted != wanted) wanted = mx::FloatOf(mx::kNan);
    same &= CHECK_EQUAL(mx::BitsOf(values[i]), mx::BitsOf(wanted));
  }
  if (!same) std::printf("  seed %llu\n", static_cast<unsigned long long>(seed));
}

}  // namespace

// cast_test [cases [first seed]]
int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 300;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  for (int isa = 0; isa <= mx::DetectedIsa() && isa <= mx::kAvx512Vnni; ++isa) {
    const mx::QuantizeKernels* quantize = &mx::kQuantizePortable;
    const mx::DequantizeKernels* dequantize = &mx::kDequantizePortable;
#if MX_X86
    if (isa == mx::kAvx2) quantize = &mx::kQuantizeAvx2, dequantize = &mx::kDequantizeAvx2;
    if (isa >= mx::kAvx512) quantize = &mx::kQuantizeAvx512, dequantize = &mx::kDequantizeAvx512;
    if (isa > mx::kAvx512 && !mx::HasVbmi()) break;
    if (isa > mx::kAvx512) quantize = &mx::kQuantizeAvx512Vbmi;
#endif
    for (int64_t i = 0; i < cases; ++i) {
      Compare(first + i, *quantize, *dequantize);
      CompareBoth(first + i, *quantize);
      CompareSquares(first + i, *quantize, *dequantize);
    }
    std::printf("%s: %lld cases of each kind\n", mx::IsaName(static_cast<mx::Isa>(isa)),
                static_cast<long long>(cases));
  }
  return mx_test::Report();
}
