// Tensor scales near the bottom of float32, against float64; and casts under them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "casts/lift.h"
#include "common/float_environment.h"
#include "common/thread_pool.h"
#include "common/tiny.h"
#include "tests/check.h"

namespace {

using mx_test::Random;

// A positive float32 of any exponent, subnormals among them.
float Draw(Random& random) {
  const uint32_t bits = random.Bits() & mx::kAbs;
  return mx::FloatOf(bits < mx::kInf ? bits : bits & mx::kMantissa);
}

// Lifted scales are rounded to float32's 24 bits, and once more where they end as subnormals.
void ScalesAreRoundedQuotients() {
  Random random(1);
  mx::KeepSubnormals environment;
  CHECK_EQUAL(mx::TensorScaleOf(0, 2688.0f) == 1.0f, true);
  CHECK_EQUAL(mx::BitsOf(mx::TensorScaleOf(1, 2688.0f)), 1u);
  for (int i = 0; i < 100000; ++i) {
    const float amax = i % 2 == 0 ? Draw(random) : std::ldexp(Draw(random), -100);
    if (amax == 0) continue;
    const int lift = amax < std::ldexp(1.0f, -64) ? 64 : 0;
    const float lifted = static_cast<float>(std::ldexp(static_cast<double>(amax), lift) / 2688.0);
    const float expected = static_cast<float>(std::ldexp(static_cast<double>(lifted), -lift));
    const float least = mx::FloatOf(1);
    CHECK_EQUAL(mx::BitsOf(mx::TensorScaleOf(mx::BitsOf(amax), 2688.0f)),
                mx::BitsOf(expected < least ? least : expected));
  }
}

void FactorsAreOneWhereTheirProductIsNormal() {
  Random random(2);
  mx::KeepSubnormals environment;
  int folded = 0;
  for (int i = 0; i < 100000; ++i) {
    const float left = Draw(random), right = Draw(random);
    const mx::Factors factors = mx::FactorsOf(left, right);
    const double exact = static_cast<double>(left) * right;
    const float product = static_cast<float>(exact);
    if (std::isnormal(product)) {
      ++folded;
      CHECK_EQUAL(factors.first == 1.0f && factors.last == product, true);
    } else {
      CHECK_EQUAL(factors.first == std::fmax(left, right), true);
      CHECK_EQUAL(factors.last == std::fmin(left, right), true);
    }
  }
  CHECK_EQUAL(folded > 10000, true);
}

// Two slices, of which the first has a tiny scale. Several tasks for each.
constexpr int64_t kSlice = 3 * mx::kTaskElements + 48;
constexpr float kTiny = 0x1.8p-120f, kOrdinary = 0x1.8p-3f;

void ValuesAreLiftedExactly() {
  Random random(3);
  const float scales[] = {kTiny, kOrdinary};
  std::vector<float> x(2 * kSlice);
  for (float& value : x) value = (random.Bits() & 1 ? -1.0f : 1.0f) * Draw(random);
  mx::QuantizePlan plan{};
  plan.x = x.data(), plan.type = mx::FloatType::kF32;
  plan.outer = 2, plan.rows = 1, plan.length = kSlice, plan.inner = 1;
  mx::NoPool nobody;
  CHECK_EQUAL(mx::LiftTiny(nobody, 2 * kSlice, &plan).values == nullptr, true);
  plan.tensor_scales = scales + 1, plan.num_tensor_scales = 1;
  CHECK_EQUAL(mx::LiftTiny(nobody, 2 * kSlice, &plan).values == nullptr, true);
  plan.tensor_scales = scales, plan.num_tensor_scales = 2;
  const mx::Lifted lifted = mx::LiftTiny(nobody, 2 * kSlice, &plan);
  CHECK_EQUAL(plan.x == lifted.values.get() && plan.x != x.data(), true);
  CHECK_EQUAL(plan.tensor_scales[0] == std::ldexp(kTiny, 64), true);
  CHECK_EQUAL(plan.tensor_scales[1] == kOrdinary, true);
  for (int64_t i = 0; i < 2 * kSlice; ++i) {
    const float expected = i < kSlice ? std::ldexp(x[i], 64) : x[i];
    CHECK_EQUAL(mx::BitsOf(lifted.values[i]), mx::BitsOf(expected));
  }
}

// E2M1 codes under E4M3 scales: lifted, the product has 24 bits, and once lowered those that fit.
template <class T>
void ValuesAreLowered(mx::FloatType type) {
  Random random(4);
  const float scales[] = {kTiny, kOrdinary};
  std::vector<uint8_t> codes(2 * kSlice), stored(2 * kSlice / 16);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random.Below(16));
  for (uint8_t& scale : stored) scale = static_cast<uint8_t>(1 + random.Below(0x7d));
  std::vector<T> out(2 * kSlice);
  mx::DequantizePlan plan{};
  plan.codes = codes.data(), plan.scales = stored.data(), plan.out = out.data(), plan.type = type;
  plan.outer = 2, plan.rows = 1, plan.length = kSlice, plan.inner = 1;
  plan.block = 16, plan.blocks_per_row = kSlice / 16;
  plan.tensor_scales = scales, plan.num_tensor_scales = 2;
  const mx::ElementFormat of_scales = mx::Derive({4, 3, 7, 1, 0, 0, 1, 0});
  mx::SetFormat(mx::Derive({2, 1, 1, 0, 0, 0, 1, 0}), mx::ScaleFormatKind::kElement, of_scales, &plan);
  mx::NoPool nobody;
  mx::DequantizeBlocks(nobody, 2 * kSlice, plan, mx::portable::kDequantize);
  for (int64_t i = 0; i < 2 * kSlice; ++i) {
    const bool tiny = i < kSlice;
    const float scale = mx::Decode(stored[i / 16], of_scales) *
                        (tiny ? std::ldexp(kTiny, 64) : kOrdinary);
    const float value = plan.values[codes[i]] * scale;
    T expected;
    mx::StoreValue(&expected, tiny ? static_cast<float>(std::ldexp(double(value), -64)) : value);
    CHECK_EQUAL(std::memcmp(&out[i], &expected, sizeof expected), 0);
  }
}

}  // namespace

int main() {
  ScalesAreRoundedQuotients();
  FactorsAreOneWhereTheirProductIsNormal();
  ValuesAreLiftedExactly();
  ValuesAreLowered<float>(mx::FloatType::kF32);
  ValuesAreLowered<mx::Bf16>(mx::FloatType::kBf16);
  ValuesAreLowered<mx::F16>(mx::FloatType::kF16);
  return mx_test::Report();
}
