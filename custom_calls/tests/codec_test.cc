// One code at a time: every code survives, ties go where they should, scales are the smallest.
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "common/element_codec.h"
#include "common/scale_codec.h"
#include "tests/cast_draw.h"
#include "tests/check.h"

namespace {

using mx::BitsOf;
using mx::Encode;
using mx::Rounding;
using mx_test::kFormats;

uint8_t Nearest(float value, const mx::ElementFormat& format) {
  return Encode(BitsOf(value), format, Rounding::kNearest, 0, 0);
}

void EveryCodeSurvives(const mx::ElementFormat& format) {
  for (int32_t code = 0; code < 2 * format.sign_code; ++code) {
    const float value = mx::Decode(code, format);
    if (!std::isfinite(value)) continue;
    // -2 of int8 is decoded and never made.
    const bool extra = format.is_integer && code == format.sign_code && !format.negative_extra;
    CHECK_EQUAL(Nearest(value, format), extra ? code + 1 : code);
  }
}

void TiesGoToEvenAndNeighboursToTheirOwn(const mx::ElementFormat& format) {
  for (int32_t code = 0; code < format.max_code; ++code) {
    const float low = mx::Magnitude(code, format), high = mx::Magnitude(code + 1, format);
    const float middle = low + (high - low) / 2;
    CHECK_EQUAL(Nearest(middle, format), code % 2 == 0 ? code : code + 1);
    CHECK_EQUAL(Nearest(std::nextafter(middle, 0.0f), format), code);
    CHECK_EQUAL(Nearest(std::nextafter(middle, high), format), code + 1);
    CHECK_EQUAL(Encode(BitsOf(middle), format, Rounding::kAway, 0, 0), code + 1);
    CHECK_EQUAL(Encode(BitsOf(middle), format, Rounding::kTowardZero, 0, 0), code);
    CHECK_EQUAL(Encode(BitsOf(middle), format, Rounding::kStochastic, 16, 0x7fff), code);
    CHECK_EQUAL(Encode(BitsOf(middle), format, Rounding::kStochastic, 16, 0x8000), code + 1);
  }
}

void OverflowSaturates(const mx::ElementFormat& format) {
  for (float value : {2 * mx::MaxOf(format), 3e38f, INFINITY}) {
    CHECK_EQUAL(Nearest(value, format), format.max_code);
  }
}

// The smallest exponent k with amax <= max 2^k, found by trying.
void RceilIsTheSmallestThatFits(const mx::ElementFormat& format) {
  const int32_t threshold =
      ((format.max_code & ((1 << format.mantissa_bits) - 1)) << (23 - format.mantissa_bits)) + 1;
  mx_test::Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const uint32_t amax = random.Bits() & mx::kAbs;
    if (amax >= mx::kInf) continue;
    const double value = mx::FloatOf(amax);
    int32_t expected = 0;
    while (expected < 254 && value > std::ldexp(double(mx::MaxOf(format)), expected - 127)) {
      ++expected;
    }
    CHECK_EQUAL(mx::E8m0OfAmax(amax, threshold, format.emax), expected);
  }
}

void ScalesInvert() {
  for (int32_t byte = 0; byte < 255; ++byte) {
    CHECK_EQUAL(mx::DecodeE8m0(byte) * mx::InverseE8m0(byte) == 1.0f, true);
  }
}

}  // namespace

int main() {
  for (const mx_test::Named& named : kFormats) {
    CHECK_EQUAL(mx::IsElement(named.facts), true);
    const mx::ElementFormat format = mx::Derive(named.facts);
    EveryCodeSurvives(format);
    TiesGoToEvenAndNeighboursToTheirOwn(format);
    OverflowSaturates(format);
    RceilIsTheSmallestThatFits(format);
  }
  ScalesInvert();
  return mx_test::Report();
}
