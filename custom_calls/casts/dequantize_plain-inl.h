// The dequantizing kernels in plain C++, which compilers turn into vectors; AVX2 decodes rows to
// float32 as dequantize_avx512-inl.h says, where compilers would look each code up.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_

#include "casts/dequantize.h"
#include "casts/places.h"
#include "common/target.h"
#if MX_RANK >= MX_RANK_avx2
#include <immintrin.h>
#endif

namespace mx::MX_TARGET {
namespace {

// What the value of a code is multiplied with, or divided by.
MX_INLINE float ScaleAt(const DequantizePlan& plan, int64_t index, const float* tensor) {
  if (plan.kind == ScaleFormatKind::kExponent) {
    return DecodeE8m0(static_cast<const uint8_t*>(plan.scales)[index]);
  }
  if (plan.kind != ScaleFormatKind::kElement) {
    return static_cast<const float*>(plan.scales)[index];
  }
  const float scale = plan.scale_values[static_cast<const uint8_t*>(plan.scales)[index]];
  return tensor == nullptr ? scale : *tensor * scale;
}

// The scale of byte 0, which blocks of zeros have, is subnormal: it costs a hundred times as much on
// some processors. Twice that scale is not; values are halved for it, which is exact.
MX_INLINE bool IsSubnormal(const DequantizePlan& plan, float scale) {
  return plan.kind == ScaleFormatKind::kExponent && (BitsOf(scale) & kAbs) < kHidden;
}

// n values that share one scale in vectors; false, with nothing of worth in `out`, where there are
// none for them.
template <class T>
MX_INLINE bool DecodeVectors(const DequantizePlan&, const uint8_t*, int64_t, float, T*) {
  return false;
}
#if MX_RANK >= MX_RANK_avx2
MX_INLINE bool DecodeVectors(const DequantizePlan& plan, const uint8_t* codes, int64_t n,
                             float scale, float* out) {
  const ElementFormat& element = plan.element;
  const int32_t p = element.mantissa_bits, sign = element.sign_code;
  const uint32_t field = (BitsOf(scale) & kAbs) >> 23;
  const bool fits = element.is_integer ? element.bits == 8
                                       : element.has_negative_zero && element.bits - 1 - p <= 5;
  // Far from the ends of float32, a power of two more or less in the scale changes no digit.
  if (!fits || n % 8 != 0 || plan.kind == ScaleFormatKind::kDivisor || field - 48 >= 160) return false;
  const __m256 factor = _mm256_set1_ps(
      scale * PowerOfTwo(element.is_integer ? element.emin - p : element.emin + 14));
  const __m128i width = _mm_set1_epi8(static_cast<char>(2 * sign - 1));
  const __m128i signs = _mm_set1_epi8(static_cast<char>(sign));
  const __m128i magnitude = _mm_set1_epi8(static_cast<char>(sign - 1));
  const __m128i up = _mm_cvtsi32_si128(10 - p);
  const __m128i mask = _mm_set1_epi16(static_cast<int16_t>(0x8000 | (sign - 1) << (10 - p)));
  __m128i most = _mm_setzero_si128();
  for (int64_t i = 0; i < n; i += 8) {
    __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    raw = _mm_sub_epi8(_mm_xor_si128(_mm_and_si128(raw, width), signs), signs);
    most = _mm_max_epu8(most, _mm_and_si128(raw, magnitude));
    const __m128i words = _mm_and_si128(_mm_sll_epi16(_mm_cvtepi8_epi16(raw), up), mask);
    const __m256 value = element.is_integer ? _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw))
                                            : _mm256_cvtph_ps(words);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(value, factor));
  }
  // NaN and Inf.
  const __m128i largest = _mm_set1_epi8(static_cast<char>(element.max_code));
  const __m128i ordinary = _mm_cmpeq_epi8(_mm_max_epu8(most, largest), largest);
  return element.is_integer || _mm_movemask_epi8(ordinary) == 0xffff;
}
#endif

// n values that share one scale.
template <class T>
MX_INLINE void DecodeRun(const DequantizePlan& plan, const uint8_t* codes, int64_t n, float scale,
                         T* out) {
  if (DecodeVectors(plan, codes, n, scale, out)) return;
  if (plan.kind == ScaleFormatKind::kDivisor) {
    for (int64_t i = 0; i < n; ++i) StoreValue(out + i, plan.values[codes[i]] / scale);
  } else if (IsSubnormal(plan, scale)) {
    for (int64_t i = 0; i < n; ++i) {
      StoreValue(out + i, plan.values[codes[i]] * 0.5f * FloatOf(kHidden));
    }
  } else {
    for (int64_t i = 0; i < n; ++i) StoreValue(out + i, plan.values[codes[i]] * scale);
  }
}

template <class T>
void RowBlock(const DequantizePlan& plan, int64_t index) {
  const int64_t row = index / plan.blocks_per_row;
  const int64_t first = (index - row * plan.blocks_per_row) * plan.block;
  const int64_t rest = plan.length - first;
  const int64_t n = rest < plan.block ? rest : plan.block;
  const int64_t start = row * plan.length + first;
  const float scale = ScaleAt(plan, index, TensorScale(plan, row));
  MX_PREFETCH(plan.codes + start + plan.ahead);
  DecodeRun(plan, plan.codes + start, n, scale, static_cast<T*>(plan.out) + start);
}

template <class T>
void RowBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) RowBlock<T>(plan, index);
}

template <class T>
void ColumnBlock(const DequantizePlan& plan, int64_t index) {
  const ColumnPlace place = PlaceOf(plan, index);
  const int64_t columns = place.columns;
  float scales[kColumnTile], halves[kColumnTile];
  for (int64_t j = 0; j < columns; ++j) {
    scales[j] = ScaleAt(plan, place.scale + j, TensorScale(plan, place.slice));
    const bool subnormal = IsSubnormal(plan, scales[j]);
    if (subnormal) scales[j] = FloatOf(kHidden);
    halves[j] = subnormal ? 0.5f : 1.0f;
  }
  for (int64_t i = 0; i < place.rows; ++i) {
    const uint8_t* codes = plan.codes + place.start + i * plan.inner;
    T* out = static_cast<T*>(plan.out) + place.start + i * plan.inner;
    if (plan.kind == ScaleFormatKind::kDivisor) {
      for (int64_t j = 0; j < columns; ++j) StoreValue(out + j, plan.values[codes[j]] / scales[j]);
    } else {
      for (int64_t j = 0; j < columns; ++j) {
        StoreValue(out + j, plan.values[codes[j]] * halves[j] * scales[j]);
      }
    }
  }
}

template <class T>
void ColumnBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) ColumnBlock<T>(plan, index);
}

void Rows(const DequantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { RowBlocks<decltype(x)>(plan, begin, end); });
}

void Columns(const DequantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { ColumnBlocks<decltype(x)>(plan, begin, end); });
}

// Two-dimensional blocks: each row of a square is a row of one-dimensional blocks, whose scales serve
// all rows of the square.
template <void (*kRows)(const DequantizePlan& plan, int64_t begin, int64_t end)>
void Squares(const DequantizePlan& plan, int64_t begin, int64_t end) {
  DequantizePlan row = plan;
  row.outer = 1;
  row.num_tensor_scales = plan.tensor_scales == nullptr ? 0 : 1;
  const int64_t width = SizeOf(plan.type);
  const bool bytes =
      plan.kind == ScaleFormatKind::kExponent || plan.kind == ScaleFormatKind::kElement;
  while (begin < end) {
    const int64_t first = begin % plan.blocks_per_row;
    const int64_t last =
        plan.blocks_per_row - first < end - begin ? plan.blocks_per_row : first + end - begin;
    const Square square = SquareOf(plan, begin - first);
    row.scales = static_cast<const char*>(plan.scales) + (begin - first) * (bytes ? 1 : 4);
    row.tensor_scales = TensorScale(plan, square.slice);
    for (int64_t i = 0; i < square.rows; ++i) {
      const int64_t start = square.start + i * plan.length;
      row.codes = plan.codes + start;
      row.out = static_cast<char*>(plan.out) + start * width;
      kRows(row, first, last);
    }
    begin += last - first;
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_PLAIN_INL_H_
