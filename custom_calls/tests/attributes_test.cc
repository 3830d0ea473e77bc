// Attributes of any size: refused, or taken without an overflow on the way, which UBSan would see.
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "casts/attributes.h"
#include "casts/geometry.h"
#include "tests/check.h"

namespace {

using Span = xla::ffi::Span<const int64_t>;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

bool Takes(const std::vector<int64_t>& shape, const std::vector<int64_t>& blocks,
           mx::Geometry* geometry) {
  return mx::FindGeometry("test", shape, Span(blocks.data(), blocks.size()), geometry).success();
}

void AxesAreWithinTheRank() {
  for (int64_t axis : {kMost, kMost - 1, int64_t{0}, int64_t{1}, int64_t{-3}, kLeast, kLeast + 1}) {
    mx::Geometry geometry;
    CHECK_EQUAL(Takes({4, 6}, {axis, 2}, &geometry), false);
  }
}

void LongBlocksHoldTheWholeAxis() {
  for (int64_t size : {int64_t{7}, int64_t{1} << 41, kMost - 1, kMost}) {
    mx::Geometry rows, columns, squares;
    CHECK_EQUAL(Takes({4, 6}, {-1, size}, &rows), true);
    CHECK_EQUAL(rows.num_blocks, 1);
    CHECK_EQUAL(mx::ScalesShape({4, 6}, rows)[1], 1);
    CHECK_EQUAL(Takes({4, 6}, {-2, size}, &columns), true);
    CHECK_EQUAL(columns.num_blocks, 1);
    CHECK_EQUAL(Takes({4, 6}, {-2, size, -1, size}, &squares), true);
    CHECK_EQUAL(squares.num_blocks, 1);
    mx::QuantizePlan plan{};
    mx::FillPlan(rows, &plan);
    CHECK_EQUAL(mx::StripColumns(plan) >= 6, true);
  }
  mx::Geometry geometry;
  CHECK_EQUAL(Takes({4, 6}, {-1, kLeast}, &geometry), false);
}

void ElementsAreOfAByte() {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  for (int32_t number : {kMax, kMax - 1, kMin, 8}) {
    for (int fact = 0; fact < 2; ++fact) {
      mx::ElementFacts facts{4, 3, 7, 1, 0, 0, 1, 0};
      (fact == 0 ? facts.exponent_bits : facts.mantissa_bits) = number;
      CHECK_EQUAL(mx::IsElement(facts), false);
    }
  }
  for (int32_t number : {kMax, kMin}) {
    CHECK_EQUAL(mx::IsElement({4, 3, number, 1, 0, 0, 1, 0}), false);
    CHECK_EQUAL(mx::IsElement({4, 3, 7, number, 0, 0, 1, 0}), false);
  }
}

}  // namespace

int main() {
  AxesAreWithinTheRank();
  LongBlocksHoldTheWholeAxis();
  ElementsAreOfAByte();
  return mx_test::Report();
}
