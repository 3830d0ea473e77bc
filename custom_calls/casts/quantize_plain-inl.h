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

// Constants of rounding to nearest even by adding a magic number.
struct Magic {
  int32_t smallest_field;  // exponent field of the smallest normal
  int32_t add;             // from a value's exponent field to its magic number's
  int32_t shift;           // bits below the code's last
  int32_t offset;          // what the smallest normal's field adds to the code
  int32_t max_code;
  int32_t sign_shift;
  int32_t sign_code;   // 0 for integers
  int32_t integer;     // -1 for integers, else 0
  int32_t extra;       // what a negative code may exceed max_code by
};

MX_INLINE Magic MagicOf(const ElementFormat& element) {
  const int32_t p = element.mantissa_bits;
  Magic magic;
  magic.smallest_field = (element.emin + 127) << 23;
  magic.add = (23 - p) << 23;
  magic.shift = 23 - p;
  magic.offset = (element.emin + 127) << p;
  magic.max_code = element.max_code;
  magic.sign_shift = 32 - element.bits;
  magic.sign_code = element.is_integer ? 0 : element.sign_code;
  magic.integer = element.is_integer ? -1 : 0;
  magic.extra = element.negative_extra ? -1 : 0;
  return magic;
}

// The sum's last bit is the code's: the addition itself rounds to nearest even. What a carry or the
// leading bit adds to the sum's pattern is what it adds to the code's exponent.
MX_INLINE int32_t HalfOf(float magnitude, const Magic& magic) {
  const int32_t field = static_cast<int32_t>(BitsOf(magnitude) & kInf);
  const int32_t floor = field > magic.smallest_field ? field : magic.smallest_field;
  const uint32_t number = static_cast<uint32_t>(floor) + static_cast<uint32_t>(magic.add);
  const uint32_t counted = BitsOf(magnitude + FloatOf(number)) - number;
  const uint32_t exponent = static_cast<uint32_t>(floor >> magic.shift);
  return static_cast<int32_t>(counted + exponent - static_cast<uint32_t>(magic.offset));
}

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

// Codes of y = x * factor, or x / factor, for any element, rounding and factor.
template <class Code>
void EncodeAny(const float* x, int64_t n, float factor, bool divides, const QuantizePlan& plan,
               const int32_t* random, Code* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const float y = divides ? x[i] / factor : x[i] * factor;
    const uint32_t bits = random == nullptr ? 0 : static_cast<uint32_t>(random[i]);
    codes[i] = Encode(BitsOf(y), plan.element, plan.rounding, plan.num_random_bits, bits);
  }
}

template <bool kInteger, bool kDivides>
void EncodeNearest(const float* MX_RESTRICT x, int64_t n, float factor, const Magic& given,
                   float limit, uint8_t* MX_RESTRICT codes) {
  const Magic magic = given;
  for (int64_t i = 0; i < n; ++i) {
    float y = kDivides ? x[i] / factor : x[i] * factor;
    // Far above every code, and still small enough for the magic number.
    y = y > limit ? limit : y;
    y = y < -limit ? -limit : y;
    codes[i] = static_cast<uint8_t>(NearestCode<kInteger>(y, magic));
  }
}

MX_INLINE bool IsFinite(float x) { return (BitsOf(x) & kAbs) < kInf; }

// Codes of n values that share one scale.
MX_INLINE void EncodeRun(const float* x, int64_t n, const BlockScale& scale,
                         const QuantizePlan& plan, const Magic& magic, const int32_t* random,
                         uint8_t* codes) {
  if (scale.is_nan) {
    memset(codes, plan.element.nan_code < 0 ? 0 : plan.element.nan_code, static_cast<size_t>(n));
    return;
  }
  const bool divides = plan.rule.kind == ScaleFormatKind::kMultiplier;
  if (plan.rounding != Rounding::kNearest || !IsSimple(plan.element) || !IsFinite(scale.factor)) {
    EncodeAny(x, n, scale.factor, divides, plan, random, codes);
    return;
  }
  const float limit = PowerOfTwo(plan.element.emax + 2);
  if (plan.element.is_integer) {
    divides ? EncodeNearest<true, true>(x, n, scale.factor, magic, limit, codes)
            : EncodeNearest<true, false>(x, n, scale.factor, magic, limit, codes);
  } else {
    divides ? EncodeNearest<false, true>(x, n, scale.factor, magic, limit, codes)
            : EncodeNearest<false, false>(x, n, scale.factor, magic, limit, codes);
  }
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

// One block of contiguous values, piece by piece.
template <class T>
void RowBlock(const QuantizePlan& plan, const Magic& magic, int64_t index, float* buffer) {
  const int64_t row = index / plan.blocks_per_row;
  const int64_t first = (index - row * plan.blocks_per_row) * plan.block;
  const int64_t rest = plan.length - first;
  const int64_t n = rest < plan.block ? rest : plan.block;
  const int64_t start = row * plan.length + first;
  const T* x = static_cast<const T*>(plan.x) + start;
  uint32_t amax = 0;
  const float* values = buffer;
  for (int64_t at = 0; at < n; at += kPiece) {
    const int64_t count = n - at < kPiece ? n - at : kPiece;
    values = WidenRun(x + at, count, buffer);
    const uint32_t largest = AmaxOf(values, count);
    amax = largest > amax ? largest : amax;
  }
  const BlockScale scale = ScaleOf(amax, plan.rule, TensorScale(plan, row));
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
  for (int64_t index = begin; index < end; ++index) RowBlock<T>(plan, magic, index, buffer);
}

// The scales of some columns, each with its own block.
struct ColumnScales {
  alignas(64) int32_t amax[kColumnTile];
  alignas(64) float factor[kColumnTile];
  alignas(64) int32_t keep[kColumnTile];  // 0 where the block is NaN, else -1
  alignas(64) int32_t nan[kColumnTile];   // the NaN code there, else 0
  bool simple;                            // whether every factor is finite
};

MX_INLINE void FindColumnScales(const QuantizePlan& plan, int64_t columns, const float* tensor,
                                int64_t index, ColumnScales* scales) {
  const int32_t nan_code = plan.element.nan_code < 0 ? 0 : plan.element.nan_code;
  scales->simple = true;
  for (int64_t j = 0; j < columns; ++j) {
    const BlockScale scale = ScaleOf(static_cast<uint32_t>(scales->amax[j]), plan.rule, tensor);
    StoreScale(plan, index + j, scale.stored);
    scales->factor[j] = scale.is_nan ? 0.0f : scale.factor;
    scales->keep[j] = scale.is_nan ? 0 : -1;
    scales->nan[j] = scale.is_nan ? nan_code : 0;
    scales->simple = scales->simple && (scale.is_nan || IsFinite(scale.factor));
  }
}

template <bool kInteger, bool kDivides>
void EncodeColumns(const float* MX_RESTRICT x, int64_t columns, const ColumnScales& scales,
                   const Magic& given, float limit, uint8_t* MX_RESTRICT codes) {
  const Magic magic = given;
  for (int64_t j = 0; j < columns; ++j) {
    float y = kDivides ? x[j] / scales.factor[j] : x[j] * scales.factor[j];
    y = y > limit ? limit : y;
    y = y < -limit ? -limit : y;
    const int32_t code = NearestCode<kInteger>(y, magic);
    codes[j] = static_cast<uint8_t>((code & scales.keep[j]) | scales.nan[j]);
  }
}

// One row of some columns.
MX_INLINE void EncodeColumnRow(const float* x, int64_t columns, const ColumnScales& scales,
                               const QuantizePlan& plan, const Magic& magic, const int32_t* random,
                               uint8_t* codes) {
  const bool divides = plan.rule.kind == ScaleFormatKind::kMultiplier;
  const float limit = PowerOfTwo(plan.element.emax + 2);
  if (plan.rounding != Rounding::kNearest || !IsSimple(plan.element) || !scales.simple) {
    for (int64_t j = 0; j < columns; ++j) {
      EncodeAny(x + j, 1, scales.factor[j], divides, plan, random == nullptr ? nullptr : random + j,
                codes + j);
      codes[j] = static_cast<uint8_t>((codes[j] & scales.keep[j]) | scales.nan[j]);
    }
    return;
  }
  if (plan.element.is_integer) {
    divides ? EncodeColumns<true, true>(x, columns, scales, magic, limit, codes)
            : EncodeColumns<true, false>(x, columns, scales, magic, limit, codes);
  } else {
    divides ? EncodeColumns<false, true>(x, columns, scales, magic, limit, codes)
            : EncodeColumns<false, false>(x, columns, scales, magic, limit, codes);
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
