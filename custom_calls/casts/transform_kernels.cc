// The kernels of block Hadamard transforms, compiled for each instruction set: see common/target.h.
//
// A group of g values takes log2(g) stages of sums and differences, where a product by the matrix
// takes g: the same sums in another order, with less rounding.
#include "casts/transform.h"
#include "common/macros.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 16;

MX_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// 1 / sqrt(size), rounded to float32: exact where size is a power of four.
float Factor(int64_t size) {
  float factor = 1.0f;
  for (; size >= 4; size >>= 2) factor *= 0.5f;
  return size == 2 ? factor * 0.70710678118654752f : factor;
}

MX_INLINE float SignOf(const TransformPlan& plan, int64_t i) {
  return plan.signs[i] < 0 ? -1.0f : 1.0f;
}

// Sums and differences of the values kDistance apart, of 16 in a row.
template <int kDistance>
MX_INLINE void StageOfLanes(float* MX_RESTRICT v) {
  float y[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const float addend = i & kDistance ? -v[i] : v[i];
    y[i] = v[i ^ kDistance] + addend;
  }
  for (int i = 0; i < kLanes; ++i) v[i] = y[i];
}

// `[rows, width]`: sums and differences of rows, all stages from a distance of one on, two at once.
MX_INLINE void StagesOfRows(float* v, int64_t rows, int64_t width) {
  int64_t distance = 1;
  for (; 4 * distance <= rows; distance *= 4) {
    for (int64_t at = 0; at < rows; at += 4 * distance) {
      for (int64_t row = at; row < at + distance; ++row) {
        float* MX_RESTRICT a = v + row * width;
        float* MX_RESTRICT b = a + distance * width;
        float* MX_RESTRICT c = b + distance * width;
        float* MX_RESTRICT d = c + distance * width;
        for (int64_t i = 0; i < width; ++i) {
          const float e = a[i] + b[i], f = a[i] - b[i], g = c[i] + d[i], h = c[i] - d[i];
          a[i] = e + g;
          b[i] = f + h;
          c[i] = e - g;
          d[i] = f - h;
        }
      }
    }
  }
  if (distance == rows) return;
  for (int64_t row = 0; row < distance; ++row) {
    float* MX_RESTRICT a = v + row * width;
    float* MX_RESTRICT b = a + distance * width;
    for (int64_t i = 0; i < width; ++i) {
      const float sum = a[i] + b[i], difference = a[i] - b[i];
      a[i] = sum;
      b[i] = difference;
    }
  }
}

// A group that lies in a row. v has room for whole lanes.
MX_INLINE void TurnRow(float* v, int64_t size) {
  if (size < kLanes) return StagesOfRows(v, size, 1);
  for (int64_t at = 0; at < size; at += kLanes) {
    StageOfLanes<1>(v + at);
    StageOfLanes<2>(v + at);
    StageOfLanes<4>(v + at);
    StageOfLanes<8>(v + at);
  }
  StagesOfRows(v, size / kLanes, kLanes);
}

// Groups of kSize, or of plan.size if that is zero, one after the other.
template <int64_t kSize, class T>
void Rows(const TransformPlan& plan, const T* x, int64_t first, int64_t last) {
  const int64_t size = kSize == 0 ? plan.size : kSize;
  const float factor = Factor(size);
  alignas(64) float v[kMaxTransform], before[kMaxTransform];
  for (int64_t i = 0; i < size; ++i) before[i] = SignOf(plan, i) * factor;
  for (int64_t group = first; group < last; ++group) {
    const int64_t at = group * size;
    if (at + size <= plan.length) {
      for (int64_t i = 0; i < size; ++i) v[i] = Widen(x[at + i]) * before[i];
      TurnRow(v, size);
      for (int64_t i = 0; i < size; ++i) plan.out[at + i] = v[i];
      continue;
    }
    const int64_t present = Least(size, plan.length - at);
    for (int64_t i = 0; i < present; ++i) v[i] = Widen(x[at + i]) * before[i];
    for (int64_t i = present; i < size; ++i) v[i] = 0.0f;
    TurnRow(v, size);
    for (int64_t i = 0; i < size; ++i) plan.out[at + i] = v[i];
  }
}

template <class T>
void Columns(const TransformPlan& plan, const T* x, int64_t first, int64_t last) {
  constexpr int64_t kFloats = 4096;  // stay in the first cache
  const float factor = Factor(plan.size);
  alignas(64) float v[kFloats];
  const int64_t strip = kFloats / plan.size;
  for (int64_t group = first; group < last; ++group) {
    const int64_t at = group * plan.size;
    const int64_t present = Least(plan.size, plan.length - at);
    for (int64_t column = 0; column < plan.inner; column += strip) {
      const int64_t width = Least(strip, plan.inner - column);
      for (int64_t row = 0; row < plan.size; ++row) {
        float* MX_RESTRICT to = v + row * width;
        const T* from = x + (at + row) * plan.inner + column;
        const float by = SignOf(plan, row) * factor;
        if (row < present) {
          for (int64_t i = 0; i < width; ++i) to[i] = Widen(from[i]) * by;
        } else {
          for (int64_t i = 0; i < width; ++i) to[i] = 0.0f;
        }
      }
      StagesOfRows(v, plan.size, width);
      for (int64_t row = 0; row < plan.size; ++row) {
        const float* MX_RESTRICT from = v + row * width;
        float* MX_RESTRICT to = plan.out + (at + row) * plan.inner + column;
        for (int64_t i = 0; i < width; ++i) to[i] = from[i];
      }
    }
  }
}

void Groups(const TransformPlan& plan, int64_t first, int64_t last) {
  ByType(plan.type, [&](auto type) {
    using T = decltype(type);
    const T* x = static_cast<const T*>(plan.x);
    if (plan.inner != 1) return Columns(plan, x, first, last);
    switch (plan.size) {
      case 16:
        return Rows<16>(plan, x, first, last);
      case 32:
        return Rows<32>(plan, x, first, last);
      case 128:
        return Rows<128>(plan, x, first, last);
      default:
        return Rows<0>(plan, x, first, last);
    }
  });
}

}  // namespace

const TransformKernels kTransform = {Groups};

}  // namespace mx::MX_TARGET
