// The quantizing kernels in plain C++, which compilers turn into vectors.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_PLAIN_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_PLAIN_INL_H_

#include "casts/places.h"
#include "casts/quantize.h"
#include "common/target.h"

namespace mx::MX_TARGET {
namespace {

// Elements that are widened to float32 at a time: they stay in the first-level cache.
constexpr int64_t kPiece = 1024;

template <bool kInteger>
MX_INLINE int32_t NearestCode(float y, const Magic& magic) {
  const uint32_t bits = BitsOf(y);
  int32_t half = HalfOf(FloatOf(bits & kAbs), magic);
  if (kInteger) {
    const int32_t negative = static_cast<int32_t>(bits) >> 31;
    const int32_t top = magic.max_code - (negative & magic.extra);
    half = half < top ? half : top;
    return (half ^ negative) - negative;
  }
  half = half < magic.max_code ? half : magic.max_code;
  return half | (static_cast<int32_t>(bits >> magic.sign_shift) & magic.sign_code);
}

// Whether rounding by magic number holds: the format has a plain sign, and y is finite and small.
MX_INLINE bool IsSimple(const ElementFormat& element) {
  return element.is_integer || element.has_negative_zero;
}

// Codes of values for any element and rounding.
template <class Value>
MX_INLINE void EncodeValues(const Value& value, int64_t n, const QuantizePlan& plan,
                            const int32_t* MX_RESTRICT random, uint8_t* MX_RESTRICT codes) {
  const ElementFormat element = plan.element;
  const int32_t num_bits = plan.num_random_bits;
  if (plan.rounding == Rounding::kStochastic) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(random[i]);
      codes[i] = Encode(BitsOf(value(i)), element, Rounding::kStochastic, num_bits, bits);
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = Encode(BitsOf(value(i)), element, plan.rounding, 0, 0);
}

// Those of x * factor, or x / factor, for any factor: of all, or of each.
template <bool kEach>
void EncodeAny(const float* MX_RESTRICT x, int64_t n, const float* MX_RESTRICT factors, bool divides,
               const QuantizePlan& plan, const int32_t* random, uint8_t* codes) {
  const auto factor = [&](int64_t i) { return factors[kEach ? i : 0]; };
  if (divides) EncodeValues([&](int64_t i) { return x[i] / factor(i); }, n, plan, random, codes);
  else EncodeValues([&](int64_t i) { return x[i] * factor(i); }, n, plan, random, codes);
}

template <bool kInteger, bool kDivides, bool kEach>
MX_INLINE void EncodeNearest(const float* MX_RESTRICT x, int64_t n, const float* MX_RESTRICT factors,
                             const Magic& constants, float limit, uint8_t* MX_RESTRICT codes) {
  const Magic magic = constants;
  for (int64_t i = 0; i < n; ++i) {
    const float factor = factors[kEach ? i : 0];
    float y = kDivides ? x[i] / factor : x[i] * factor;
    // Far above every code, and still small enough for the magic number.
    y = y > limit ? limit : y;
    y = y < -limit ? -limit : y;
    codes[i] = static_cast<uint8_t>(NearestCode<kInteger>(y, magic));
  }
}

MX_INLINE bool IsFinite(float x) { return (BitsOf(x) & kAbs) < kInf; }

// Codes of n values under one factor, or one for each; `finite`: whether all of them are.
template <bool kEach>
MX_INLINE void EncodeScaled(const float* x, int64_t n, const float* factors, bool finite,
                            const QuantizePlan& plan, const Magic& magic, const int32_t* random,
                            uint8_t* codes) {
  const bool divides = plan.rule.kind == ScaleFormatKind::kMultiplier;
  if (plan.rounding != Rounding::kNearest || !IsSimple(plan.element) || !finite) {
    EncodeAny<kEach>(x, n, factors, divides, plan, random, codes);
    return;
  }
  const float limit = PowerOfTwo(plan.element.emax + 2);
  if (plan.element.is_integer) {
    divides ? EncodeNearest<true, true, kEach>(x, n, factors, magic, limit, codes)
            : EncodeNearest<true, false, kEach>(x, n, factors, magic, limit, codes);
  } else {
    divides ? EncodeNearest<false, true, kEach>(x, n, factors, magic, limit, codes)
            : EncodeNearest<false, false, kEach>(x, n, factors, magic, limit, codes);
  }
}

MX_INLINE int NanCode(const QuantizePlan& plan) {
  return plan.element.nan_code < 0 ? 0 : plan.element.nan_code;
}

// Codes of n values that share one scale.
MX_INLINE void EncodeRun(const float* x, int64_t n, const BlockScale& scale,
                         const QuantizePlan& plan, const Magic& magic, const int32_t* random,
                         uint8_t* codes) {
  if (scale.is_nan) memset(codes, NanCode(plan), static_cast<size_t>(n));
  else EncodeScaled<false>(x, n, &scale.factor, IsFinite(scale.factor), plan, magic, random, codes);
}

template <class T>
MX_INLINE void CopyWidened(const T* MX_RESTRICT x, int64_t n, float* MX_RESTRICT out) {
  for (int64_t i = 0; i < n; ++i) out[i] = Widen(x[i]);
}

template <class T>
MX_INLINE const float* WidenRun(const T* x, int64_t n, float* buffer) {
  CopyWidened(x, n, buffer);
  return buffer;
}
MX_INLINE const float* WidenRun(const float* x, int64_t, float*) { return x; }

MX_INLINE uint32_t AmaxOf(const float* x, int64_t n) {
  int32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = static_cast<int32_t>(BitsOf(x[i]) & kAbs);
    amax = magnitude > amax ? magnitude : amax;
  }
  return static_cast<uint32_t>(amax);
}

MX_INLINE void StoreScale(const QuantizePlan& plan, int64_t index, uint32_t stored) {
  if (plan.rule.kind == ScaleFormatKind::kExponent || plan.rule.kind == ScaleFormatKind::kElement) {
    static_cast<uint8_t*>(plan.scales)[index] = static_cast<uint8_t>(stored);
  } else {
    static_cast<uint32_t*>(plan.scales)[index] = stored;
  }
}

// One block of n contiguous values, from `start` on.
template <class T>
MX_INLINE void RowBlock(const QuantizePlan& plan, const Magic& magic, int64_t index, int64_t start,
                        int64_t n, float* buffer) {
  const T* x = static_cast<const T*>(plan.x) + start;
  uint32_t amax = 0;
  const float* values = buffer;
  for (int64_t at = 0; at < n; at += kPiece) {
    const int64_t count = n - at < kPiece ? n - at : kPiece;
    values = WidenRun(x + at, count, buffer);
    const uint32_t largest = AmaxOf(values, count);
    amax = largest > amax ? largest : amax;
  }
  const BlockScale scale = ScaleOf(amax, plan.rule, TensorScale(plan, index / plan.blocks_per_row));
  StoreScale(plan, index, scale.stored);
  for (int64_t at = 0; at < n; at += kPiece) {
    const int64_t count = n - at < kPiece ? n - at : kPiece;
    if (n > kPiece) values = WidenRun(x + at, count, buffer);
    const int32_t* random = plan.random_bits == nullptr ? nullptr : plan.random_bits + start + at;
    EncodeRun(values, count, scale, plan, magic, random, plan.codes + start + at);
  }
}

template <class T>
void RowBlocks(const QuantizePlan& plan, int64_t begin, int64_t end) {
  alignas(64) float buffer[kPiece];
  const Magic magic = MagicOf(plan.element);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t row = index / plan.blocks_per_row;
    const int64_t first = (index - row * plan.blocks_per_row) * plan.block;
    const int64_t rest = plan.length - first, start = row * plan.length + first;
    const int64_t n = rest < plan.block ? rest : plan.block;
    // Loops of known length have no ends to look after.
    if (n == 32) RowBlock<T>(plan, magic, index, start, 32, buffer);
    else if (n == 16) RowBlock<T>(plan, magic, index, start, 16, buffer);
    else RowBlock<T>(plan, magic, index, start, n, buffer);
  }
}

// The scales of some columns, each with its own block.
struct ColumnScales {
  alignas(64) int32_t amax[kColumnTile];
  alignas(64) float factor[kColumnTile];
  bool is_nan[kColumnTile];  // whether the block is
  bool some_nan, finite;     // whether one of them is, and every factor
};

MX_INLINE void FindColumnScales(const QuantizePlan& plan, int64_t columns, const float* tensor,
                                int64_t index, ColumnScales* scales) {
  scales->some_nan = false, scales->finite = true;
  for (int64_t j = 0; j < columns; ++j) {
    const BlockScale scale = ScaleOf(static_cast<uint32_t>(scales->amax[j]), plan.rule, tensor);
    StoreScale(plan, index + j, scale.stored);
    scales->factor[j] = scale.is_nan ? 0.0f : scale.factor;
    scales->is_nan[j] = scale.is_nan;
    scales->some_nan = scales->some_nan || scale.is_nan;
    scales->finite = scales->finite && (scale.is_nan || IsFinite(scale.factor));
  }
}

// One row of some columns.
MX_INLINE void EncodeColumnRow(const float* x, int64_t columns, const ColumnScales& scales,
                               const QuantizePlan& plan, const Magic& magic, const int32_t* random,
                               uint8_t* codes) {
  EncodeScaled<true>(x, columns, scales.factor, scales.finite, plan, magic, random, codes);
  for (int64_t j = 0; scales.some_nan && j < columns; ++j) {
    if (scales.is_nan[j]) codes[j] = static_cast<uint8_t>(NanCode(plan));
  }
}

// Rows of a tile that are kept as float32 between the two passes; taller blocks are read again.
constexpr int64_t kTileRows = 64;

template <class T>
void ColumnBlock(const QuantizePlan& plan, const Magic& magic, int64_t index, float* tile) {
  const ColumnPlace place = PlaceOf(plan, index);
  const int64_t rows = place.rows, columns = place.columns, start = place.start;
  const T* x = static_cast<const T*>(plan.x) + start;
  const bool fits = rows <= kTileRows;

  ColumnScales scales;
  for (int64_t j = 0; j < kColumnTile; ++j) scales.amax[j] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    float* MX_RESTRICT kept = tile + (fits ? i * kColumnTile : 0);
    CopyWidened(x + i * plan.inner, columns, kept);
    for (int64_t j = 0; j < columns; ++j) {
      const int32_t magnitude = static_cast<int32_t>(BitsOf(kept[j]) & kAbs);
      scales.amax[j] = magnitude > scales.amax[j] ? magnitude : scales.amax[j];
    }
  }
  FindColumnScales(plan, columns, TensorScale(plan, place.slice), place.scale, &scales);
  for (int64_t i = 0; i < rows; ++i) {
    float* kept = tile + (fits ? i * kColumnTile : 0);
    if (!fits) CopyWidened(x + i * plan.inner, columns, kept);
    const int64_t at = start + i * plan.inner;
    const int32_t* random = plan.random_bits == nullptr ? nullptr : plan.random_bits + at;
    EncodeColumnRow(kept, columns, scales, plan, magic, random, plan.codes + at);
  }
}

template <class T>
void ColumnBlocks(const QuantizePlan& plan, int64_t begin, int64_t end) {
  alignas(64) float tile[kTileRows * kColumnTile];
  const Magic magic = MagicOf(plan.element);
  for (int64_t index = begin; index < end; ++index) ColumnBlock<T>(plan, magic, index, tile);
}

[[maybe_unused]] void Rows(const QuantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { RowBlocks<decltype(x)>(plan, begin, end); });
}

[[maybe_unused]] void Columns(const QuantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { ColumnBlocks<decltype(x)>(plan, begin, end); });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_QUANTIZE_PLAIN_INL_H_
