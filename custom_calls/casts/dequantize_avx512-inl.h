// Dequantizing with AVX-512. A code's magnitude, moved to the top of a half's mantissa, is a half
// that differs from its value by a power of two, subnormal or not; converting it to float32 is
// exact.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_AVX512_INL_H_

#include <immintrin.h>

#include "casts/dequantize_plain-inl.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kMostPerBlock = 1024;

MX_INLINE __m512i Set(int32_t value) { return _mm512_set1_epi32(value); }

// Constants of a decoding.
struct Decoder {
  __m512i width, sign, magnitude, max_code, half_counts, half_mask;
  int32_t exponent;  // what is still missing from a half, as a power of two
  bool is_integer;
  bool is_narrow;    // less than eight bits
  bool has_special;  // codes of NaN or Inf
};

MX_INLINE Decoder DecoderOf(const ElementFormat& element) {
  const int32_t p = element.mantissa_bits;
  Decoder decoder;
  decoder.width = _mm512_set1_epi8(static_cast<char>(2 * element.sign_code - 1));
  decoder.sign = _mm512_set1_epi8(static_cast<char>(element.sign_code));
  decoder.magnitude = _mm512_set1_epi8(static_cast<char>(element.sign_code - 1));
  decoder.max_code = _mm512_set1_epi8(static_cast<char>(element.max_code));
  decoder.half_counts = _mm512_set1_epi16(static_cast<int16_t>(10 - p));
  decoder.half_mask =
      _mm512_set1_epi16(static_cast<int16_t>(0x8000 | (element.sign_code - 1) << (10 - p)));
  decoder.is_integer = element.is_integer != 0;
  decoder.is_narrow = element.bits < 8;
  decoder.exponent = element.is_integer ? element.emin - p : element.emin + 14;
  decoder.has_special = !element.is_integer && element.max_code != element.sign_code - 1;
  return decoder;
}

// 64 codes with their sign in bit 7; `most` gathers the largest magnitude of what may be NaN or Inf.
MX_INLINE __m512i LoadCodes(const uint8_t* from, const Decoder& decoder, __m512i* most) {
  __m512i codes = _mm512_loadu_si512(from);
  if (decoder.is_narrow) {
    codes = _mm512_and_si512(codes, decoder.width);
    codes = _mm512_sub_epi8(_mm512_xor_si512(codes, decoder.sign), decoder.sign);
  }
  if (decoder.has_special) {
    *most = _mm512_max_epu8(*most, _mm512_and_si512(codes, decoder.magnitude));
  }
  return codes;
}

// Whether any code was NaN or Inf, given the largest magnitudes.
MX_INLINE bool AnySpecial(__m512i most, const Decoder& decoder) {
  return _mm512_cmpgt_epu8_mask(most, decoder.max_code) != 0;
}

// The values of 64 codes, but for the decoder's power of two.
template <bool kInteger>
MX_INLINE void Values(__m512i codes, const Decoder& decoder, __m512 (&values)[4]) {
  const __m256i halves[] = {_mm512_castsi512_si256(codes), _mm512_extracti64x4_epi64(codes, 1)};
  for (int half = 0; half < 2; ++half) {
    __m512i words = _mm512_cvtepi8_epi16(halves[half]);
    if (kInteger) {
      const __m128i low = _mm256_castsi256_si128(halves[half]);
      const __m128i high = _mm256_extracti128_si256(halves[half], 1);
      values[2 * half] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low));
      values[2 * half + 1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(high));
      continue;
    }
    words = _mm512_and_si512(_mm512_sllv_epi16(words, decoder.half_counts), decoder.half_mask);
    values[2 * half] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    values[2 * half + 1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
  }
}

// kExact: no bits are lost, as power-of-two scales ensure.
template <bool kExact>
MX_INLINE void Store(float* out, __m512 a, __m512 b) {
  _mm512_storeu_ps(out, a);
  _mm512_storeu_ps(out + kLanes, b);
}
template <bool kExact>
MX_INLINE __m512i Bf16Bits(__m512 a) {
  __m512i bits = _mm512_castps_si512(a);
  if (!kExact) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), Set(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, Set(0x7fff)), odd);
  }
  return _mm512_srli_epi32(bits, 16);
}
template <bool kExact>
MX_INLINE void Store(Bf16* out, __m512 a, __m512 b) {
  const __m512i words = _mm512_packus_epi32(Bf16Bits<kExact>(a), Bf16Bits<kExact>(b));
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi64(order, words));
}
template <bool kExact>
MX_INLINE void Store(F16* out, __m512 a, __m512 b) {
  const __m256i low = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT);
  _mm512_storeu_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

// Blocks whose factors are found together.
constexpr int kGroup = 16;

// The smallest byte of a scale under which values may be found by one exact product. In float32 that
// is any whose factor is normal, as it is for blocks of zeros; narrower values may need rounding.
template <class T>
MX_INLINE int32_t LowestByte(const T*, const Decoder&) {
  return 48;
}
MX_INLINE int32_t LowestByte(const float*, const Decoder& decoder) {
  return decoder.exponent > 0 ? 0 : 48;
}

// The factor of each of `count` blocks, the decoder's power of two included; false where one is not
// far from the ends of float32, or is NaN: then values need care.
template <class T>
MX_INLINE bool FindFactors(const DequantizePlan& plan, const Decoder& decoder, int64_t index,
                           int64_t count, const float* tensor, float* factors) {
  if (plan.kind == ScaleFormatKind::kExponent) {
    const __mmask16 valid = static_cast<__mmask16>((1u << count) - 1);
    const uint8_t* scales = static_cast<const uint8_t*>(plan.scales) + index;
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(valid, scales));
    const int32_t lowest = LowestByte(static_cast<const T*>(nullptr), decoder);
    const __mmask16 far =
        _mm512_cmplt_epu32_mask(_mm512_sub_epi32(bytes, Set(lowest)), Set(208 - lowest));
    _mm512_store_si512(factors,
                       _mm512_slli_epi32(_mm512_add_epi32(bytes, Set(decoder.exponent)), 23));
    return (far & valid) == valid;
  }
  bool usual = true;
  for (int64_t i = 0; i < count; ++i) {
    const float scale = ScaleAt(plan, index + i, tensor);
    const uint32_t field = (BitsOf(scale) & kAbs) >> 23;
    usual = usual && field >= 48 && field < 208;
    factors[i] = scale * PowerOfTwo(decoder.exponent);
  }
  return usual;
}

template <class T, bool kInteger, bool kExact>
void DecodeSegment(const DequantizePlan& plan, const Decoder& constants, int64_t index,
                   int64_t count, const uint8_t* codes, T* out, const float* tensor) {
  // A copy, which no store can change, stays in registers.
  const Decoder decoder = constants;
  const int shift = __builtin_ctzll(static_cast<unsigned long long>(plan.block));
  alignas(64) float factors[kGroup];
  while (count > 0) {
    const int64_t blocks = count < kGroup ? count : kGroup;
    const int64_t n = blocks * plan.block;
    bool usual = n % 64 == 0 && FindFactors<T>(plan, decoder, index, blocks, tensor, factors);
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; usual && i < n; i += 64) {
      MX_PREFETCH(codes + i + plan.ahead);
      __m512 values[4];
      Values<kInteger>(LoadCodes(codes + i, decoder, &most), decoder, values);
      const float* factor = factors + (i >> shift);
      for (int v = 0; v < 4; ++v) {
        values[v] = _mm512_mul_ps(values[v], _mm512_set1_ps(factor[v * kLanes >> shift]));
      }
      Store<kExact>(out + i, values[0], values[1]);
      Store<kExact>(out + i + 2 * kLanes, values[2], values[3]);
    }
    usual = usual && !AnySpecial(most, decoder);
    if (MX_UNLIKELY(!usual)) RowBlocks<T>(plan, index, index + blocks);
    codes += n;
    out += n;
    index += blocks;
    count -= blocks;
  }
}

template <class T>
void DecodeSegmentAnyWay(const DequantizePlan& plan, const Decoder& decoder, int64_t index,
                         int64_t count, const uint8_t* codes, T* out, const float* tensor) {
  const bool exact = plan.kind == ScaleFormatKind::kExponent;
  if (decoder.is_integer) {
    return DecodeSegment<T, true, true>(plan, decoder, index, count, codes, out, tensor);
  }
  exact ? DecodeSegment<T, false, true>(plan, decoder, index, count, codes, out, tensor)
        : DecodeSegment<T, false, false>(plan, decoder, index, count, codes, out, tensor);
}

MX_INLINE bool SuitsVectors(const DequantizePlan& plan) {
  const ElementFormat& element = plan.element;
  const bool exponent = plan.kind == ScaleFormatKind::kExponent;
  if (plan.kind == ScaleFormatKind::kDivisor) return false;
  if (element.is_integer) return exponent && element.bits == 8;
  // The fields of a half must hold those of the element.
  return element.has_negative_zero && element.bits - 1 - element.mantissa_bits <= 5;
}

template <class T>
void Avx512RowBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  const Decoder decoder = DecoderOf(plan.element);
  const bool flat = plan.length % plan.block == 0 && plan.num_tensor_scales <= 1;
  ForRuns(
      plan, flat, begin, end,
      [&](int64_t block, int64_t count, int64_t row, int64_t start) {
        DecodeSegmentAnyWay<T>(plan, decoder, block, count, plan.codes + start,
                               static_cast<T*>(plan.out) + start, TensorScale(plan, row));
      },
      [&](int64_t block) { RowBlock<T>(plan, block); });
}

void Avx512Rows(const DequantizePlan& plan, int64_t begin, int64_t end) {
  const int64_t block = plan.block;
  const bool fits = block >= kLanes && (block & (block - 1)) == 0 && block <= kMostPerBlock;
  if (!fits || !SuitsVectors(plan)) return Rows(plan, begin, end);
  ByType(plan.type, [&](auto x) { Avx512RowBlocks<decltype(x)>(plan, begin, end); });
}

// A full tile of columns, a lane each; false where something needs care.
template <class T, bool kInteger>
MX_INLINE bool DecodeColumnTile(const DequantizePlan& plan, const Decoder& decoder,
                                const uint8_t* codes, T* out, int64_t rows,
                                const float (&factors)[kColumnTile]) {
  __m512 factor[4];
  for (int v = 0; v < 4; ++v) factor[v] = _mm512_load_ps(factors + v * kLanes);
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < rows; ++i) {
    __m512 values[4];
    Values<kInteger>(LoadCodes(codes + i * plan.inner, decoder, &most), decoder, values);
    for (int v = 0; v < 4; v += 2) {
      const __m512 a = _mm512_mul_ps(values[v], factor[v]);
      const __m512 b = _mm512_mul_ps(values[v + 1], factor[v + 1]);
      T* to = out + i * plan.inner + v * kLanes;
      plan.kind == ScaleFormatKind::kExponent ? Store<true>(to, a, b) : Store<false>(to, a, b);
    }
  }
  return !AnySpecial(most, decoder);
}

template <class T>
void Avx512ColumnBlocks(const DequantizePlan& plan, int64_t begin, int64_t end) {
  const Decoder decoder = DecoderOf(plan.element);
  for (int64_t index = begin; index < end; ++index) {
    const ColumnPlace place = PlaceOf(plan, index);
    alignas(64) float factors[kColumnTile];
    bool usual = place.columns == kColumnTile;
    for (int v = 0; usual && v < 4; ++v) {
      usual = FindFactors<T>(plan, decoder, place.scale + v * kLanes, kGroup,
                             TensorScale(plan, place.slice), factors + v * kLanes);
    }
    const uint8_t* codes = plan.codes + place.start;
    T* out = static_cast<T*>(plan.out) + place.start;
    if (usual) {
      usual = decoder.is_integer
                  ? DecodeColumnTile<T, true>(plan, decoder, codes, out, place.rows, factors)
                  : DecodeColumnTile<T, false>(plan, decoder, codes, out, place.rows, factors);
    }
    if (!usual) ColumnBlock<T>(plan, index);
  }
}

void Avx512Columns(const DequantizePlan& plan, int64_t begin, int64_t end) {
  if (!SuitsVectors(plan)) return Columns(plan, begin, end);
  ByType(plan.type, [&](auto x) { Avx512ColumnBlocks<decltype(x)>(plan, begin, end); });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DEQUANTIZE_AVX512_INL_H_
