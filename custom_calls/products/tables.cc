// Values of every code and scale byte, from the formats' own facts.
#include <cmath>
#include <cstring>
#include <limits>

#include "common/float_environment.h"
#include "products/kernels.h"

namespace mx {
namespace {

// Sign, exponent field, mantissa field; reserved codes at the top. OCP MX v1.0, section 5.3.
struct Facts {
  int exponent_bits, mantissa_bits, bias, reserved;
  bool has_inf;
  int shift;  // value * 2^shift is an integer
};

constexpr Facts kFacts[] = {
    {4, 3, 7, 1, false, 9},   // E4M3
    {5, 2, 15, 4, true, 16},  // E5M2
    {2, 3, 1, 0, false, 3},   // E2M3
    {3, 2, 3, 0, false, 4},   // E3M2
    {2, 1, 1, 0, false, 1},   // E2M1
};
constexpr int kInt8Shift = 6;
constexpr int kShifts = 7;  // what the integer types need: 0 to 6

float Value(const Facts& facts, int code) {
  const int bits = 1 + facts.exponent_bits + facts.mantissa_bits;
  const int sign = 1 << (bits - 1), half = code & (sign - 1);
  const int largest = sign - 1 - facts.reserved;
  const int field = half >> facts.mantissa_bits, mantissa = half & ((1 << facts.mantissa_bits) - 1);
  const int significand = field ? mantissa + (1 << facts.mantissa_bits) : mantissa;
  float magnitude = std::ldexp(static_cast<float>(significand),
                               (field ? field : 1) - facts.bias - facts.mantissa_bits);
  if (half > largest) {
    magnitude = facts.has_inf && half == largest + 1 ? std::numeric_limits<float>::infinity()
                                                     : std::numeric_limits<float>::quiet_NaN();
  }
  return code & sign ? -magnitude : magnitude;
}

float ElementValue(Element element, int code) {
  if (element == kElementInt8) {
    return std::ldexp(static_cast<float>(static_cast<int8_t>(code)), -kInt8Shift);
  }
  const Facts& facts = kFacts[element];
  return Value(facts, code & ((2 << (facts.exponent_bits + facts.mantissa_bits)) - 1));
}

struct AllTables {
  ElementTables of[kElementInt8 + 1];
  float e8m0[kShifts][256];  // by the factor's exponent
  float e4m3[kShifts][256];

  AllTables() {
    KeepSubnormals environment;
    std::memset(of, 0, sizeof of);
    for (int element = kE4M3; element <= kElementInt8; ++element) {
      Fill(static_cast<Element>(element));
    }
    for (int shift = 0; shift < kShifts; ++shift) {
      for (int byte = 0; byte < 256; ++byte) {
        e8m0[shift][byte] = byte == 255 ? std::numeric_limits<float>::quiet_NaN()
                                        : std::ldexp(1.0f, byte - 127 - shift);
        e4m3[shift][byte] = std::ldexp(Value(kFacts[kE4M3], byte), -shift);
      }
    }
  }

  void Fill(Element element) {
    ElementTables& tables = of[element];
    for (int code = 0; code < 256; ++code) {
      const float value = ElementValue(element, code);
      tables.float32[code] = value;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      tables.bf16[code] = static_cast<uint16_t>(bits >> 16);  // at most 8 significant bits
      if (element == kE4M3 || element == kE5M2) continue;
      const int shift = element == kElementInt8 ? kInt8Shift : kFacts[element].shift;
      const int integer = static_cast<int>(std::ldexp(value, shift));
      tables.int8[code] = static_cast<int8_t>(integer);
      tables.int16[code] = static_cast<int16_t>(integer);
    }
  }
};

const AllTables& Tables() {
  static const AllTables tables;
  return tables;
}

}  // namespace

const ElementTables& TablesOf(Element element) { return Tables().of[element]; }

const float* ScaleTable(ScaleKind kind, Element element, PanelType type) {
  const bool integers = type == kInt8 || type == kInt16;
  const int shift = !integers || element > kElementInt8 ? 0
                    : element == kElementInt8           ? kInt8Shift
                                                        : kFacts[element].shift;
  return kind == kScaleE4M3 ? Tables().e4m3[shift] : Tables().e8m0[shift];
}

}  // namespace mx
