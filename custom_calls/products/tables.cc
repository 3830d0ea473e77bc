// Values of every code and scale byte, from the formats' own facts.
#include <cmath>
#include <cstring>
#include <limits>

#include "common/element_codec.h"
#include "common/float_environment.h"
#include "products/kernels.h"

namespace mx {
namespace {

constexpr int kShifts = 7;  // what the integer types need: 0 to 6

// A NaN keeps the code's sign.
float ValueOf(Element element, int code) {
  const ElementFormat format = Derive(kElementFacts[element]);
  const float value = Decode(code, format);
  return value != value && (code & format.sign_code) ? -value : value;
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
        e4m3[shift][byte] = std::ldexp(ValueOf(kE4M3, byte), -shift);
      }
    }
  }

  void Fill(Element element) {
    ElementTables& tables = of[element];
    for (int code = 0; code < 256; ++code) {
      const float value = ValueOf(element, code);
      tables.float32[code] = value;
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      tables.bf16[code] = static_cast<uint16_t>(bits >> 16);  // at most 8 significant bits
      if (!FitsInt16(element)) continue;
      const int integer = static_cast<int>(std::ldexp(value, UnitShift(element)));
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
  const int shift = integers && element <= kElementInt8 ? UnitShift(element) : 0;
  return kind == kScaleE4M3 ? Tables().e4m3[shift] : Tables().e8m0[shift];
}

}  // namespace mx
