// Sixteen values at a time with AVX-512: their codes, and the scales of sixteen blocks side by
// side.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_VECTORS_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_VECTORS_AVX512_INL_H_

#include <immintrin.h>

#include "casts/quantize_plain-inl.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 16;
constexpr int kGroup = 16;  // blocks whose scales are computed together

MX_INLINE __m512i Set(int32_t value) { return _mm512_set1_epi32(value); }

MX_INLINE __m512 Load(const float* x) { return _mm512_loadu_ps(x); }
MX_INLINE __m512 Load(const Bf16* x) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
MX_INLINE __m512 Load(const F16* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// The constants of an encoding, one vector each. With E the exponent field of the value or, if that
// is larger, of the smallest normal, `E + number` is a magic number whose last bit is the code's:
// adding it rounds to nearest even. Its mantissa already holds what makes the sum's pattern, less E,
// plus E / 2^shift, the code plus `base`, and base has no bits where codes have.
struct Encoder {
  __m512i smallest_field, largest_field, number, top, sign_mask, random_mask;
  __m512i shift_counts, sign_counts, random_counts, dropped, mantissa_counts, bias;
  __m512 sixty_four;
  __m512i lowest;
  __m512i word_shift, word_fraction, word_hidden, byte_top, byte_sign, byte_sign_counts;
  __m512i emin;
  Rounding rounding;
  bool stream;  // whether 64 codes are a line of memory, and go past the caches
};

MX_INLINE Encoder EncoderOf(const QuantizePlan& plan) {
  const ElementFormat& element = plan.element;
  const int32_t p = element.mantissa_bits;
  const int32_t offset = (element.emin + 127) << p;
  const int32_t add = (23 - p) << 23, middle = 1 << 22;
  Encoder encoder;
  encoder.smallest_field = Set((element.emin + 127) << 23);
  encoder.largest_field = Set((element.emax + 2 + 127) << 23);
  encoder.number = Set(add + middle - offset);
  encoder.top = Set(add + middle + element.max_code);
  encoder.sign_mask = Set(~(element.sign_code - 1));
  encoder.shift_counts = Set(23 - p);
  encoder.sign_counts = Set(32 - element.bits);
  encoder.random_counts = Set(plan.num_random_bits);
  encoder.random_mask = Set(0);
  encoder.dropped = Set(23 - p);
  encoder.mantissa_counts = Set(p);
  encoder.bias = Set(127 + element.emin);
  encoder.sixty_four = _mm512_set1_ps(PowerOfTwo(p - element.emin));
  encoder.lowest = _mm512_set1_epi8(
      static_cast<char>(-element.max_code - (element.negative_extra ? 1 : 0)));
  encoder.word_shift = _mm512_set1_epi16(static_cast<int16_t>(p + 1));
  encoder.word_fraction = _mm512_set1_epi16(static_cast<int16_t>(0x7f << (p + 1)));
  encoder.word_hidden = _mm512_set1_epi16(static_cast<int16_t>(0x80 << (p + 1)));
  encoder.byte_top = _mm512_set1_epi8(static_cast<char>(element.max_code));
  encoder.byte_sign = _mm512_set1_epi8(static_cast<char>(element.sign_code));
  encoder.byte_sign_counts = _mm512_set1_epi16(static_cast<int16_t>(8 - element.bits));
  encoder.emin = Set(element.emin);
  encoder.rounding = plan.rounding;
  encoder.stream = false;
  return encoder;
}

// `base` plus the codes of magnitudes, before saturation. kWide: they may be any numbers.
template <bool kWide>
MX_INLINE __m512i NearestHalves(__m512 magnitude, const Encoder& encoder) {
  __m512i field = _mm512_and_si512(_mm512_castps_si512(magnitude), Set(kInf));
  field = _mm512_max_epi32(field, encoder.smallest_field);
  if (kWide) field = _mm512_min_epi32(field, encoder.largest_field);
  const __m512 number = _mm512_castsi512_ps(_mm512_add_epi32(field, encoder.number));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(magnitude, number));
  const __m512i counted = _mm512_sub_epi32(sum, field);
  return _mm512_add_epi32(counted, _mm512_srlv_epi32(field, encoder.shift_counts));
}

// Codes of y in the low bits of each lane, the bits above them zero.
template <bool kWide>
MX_INLINE __m512i NearestCodes(__m512 y, const Encoder& encoder) {
  const __m512i bits = _mm512_castps_si512(y);
  const __m512 magnitude = _mm512_castsi512_ps(_mm512_and_si512(bits, Set(kAbs)));
  __m512i half = NearestHalves<kWide>(magnitude, encoder);
  half = _mm512_min_epi32(half, encoder.top);
  // Where sign_mask has ones, the pattern's leading bits; elsewhere the code.
  const __m512i sign = _mm512_srlv_epi32(bits, encoder.sign_counts);
  return _mm512_ternarylogic_epi32(encoder.sign_mask, sign, half, 0xca);
}

// The same by integer arithmetic, for the other ways of rounding; see RoundedShift.
MX_INLINE __m512i RoundedCodes(__m512 y, const Encoder& encoder, const int32_t* random,
                               __mmask16 valid) {
  const __m512i bits = _mm512_castps_si512(y);
  const __m512i magnitude = _mm512_and_si512(bits, Set(kAbs));
  const __m512i above = _mm512_sub_epi32(_mm512_srli_epi32(magnitude, 23), encoder.bias);
  const __m512i below = _mm512_max_epi32(_mm512_sub_epi32(Set(0), above), Set(0));
  const __m512i shift = _mm512_add_epi32(encoder.dropped, below);
  // Shifts by 32 and more give 0 here, which is right: nothing of the significand is left.
  const __m512i significand =
      _mm512_or_si512(_mm512_and_si512(magnitude, Set(kMantissa)), Set(kHidden));
  __m512i half;
  if (encoder.rounding == Rounding::kStochastic) {
    const __m512i drawn = _mm512_maskz_loadu_epi32(valid, random);
    // As many bits below the code's last as are drawn: no format drops fewer.
    const __m512i leading =
        _mm512_srlv_epi32(significand, _mm512_sub_epi32(shift, encoder.random_counts));
    half = _mm512_srlv_epi32(_mm512_add_epi32(leading, drawn), encoder.random_counts);
  } else if (encoder.rounding == Rounding::kAway) {
    const __m512i quantum = _mm512_sllv_epi32(Set(1), _mm512_sub_epi32(shift, Set(1)));
    half = _mm512_srlv_epi32(_mm512_add_epi32(significand, quantum), shift);
  } else {
    half = _mm512_srlv_epi32(significand, shift);
  }
  const __m512i field = _mm512_min_epi32(_mm512_max_epi32(above, Set(0)), Set(255));
  return _mm512_add_epi32(half, _mm512_sllv_epi32(field, encoder.mantissa_counts));
}

// Saturates the halves of RoundedCodes and gives them the sign of y.
template <bool kInteger>
MX_INLINE __m512i Signed(__m512i half, __m512 y, const Encoder& encoder,
                         const ElementFormat& element) {
  const __m512i bits = _mm512_castps_si512(y);
  if (!kInteger) {
    half = _mm512_min_epi32(half, Set(element.max_code));
    const __m512i sign = _mm512_srlv_epi32(bits, encoder.sign_counts);
    return _mm512_ternarylogic_epi32(encoder.sign_mask, sign, half, 0xca);
  }
  const __m512i negative = _mm512_srai_epi32(bits, 31);
  const __m512i extra = Set(element.negative_extra ? -1 : 0);
  const __m512i top = _mm512_sub_epi32(Set(element.max_code), _mm512_and_si512(negative, extra));
  half = _mm512_min_epi32(half, top);
  half = _mm512_sub_epi32(_mm512_xor_si512(half, negative), negative);
  return _mm512_and_si512(half, Set(0xff));
}

// How codes are made: known while compiling, so that no branch is left in a loop.
enum class Way { kFloat, kFloatWide, kFloatDivided, kInteger, kFloatRounded, kIntegerRounded };

// Codes of y, each in a lane of 32 bits; for kInteger as signed numbers, not yet saturated.
template <Way kWay>
MX_INLINE __m512i Codes(__m512 y, const Encoder& encoder, const ElementFormat& element,
                        const int32_t* random, __mmask16 valid) {
  if (kWay == Way::kInteger) return _mm512_cvtps_epi32(_mm512_mul_ps(y, encoder.sixty_four));
  if (kWay == Way::kFloat) return NearestCodes<false>(y, encoder);
  if (kWay == Way::kFloatWide || kWay == Way::kFloatDivided) return NearestCodes<true>(y, encoder);
  const __m512i half = RoundedCodes(y, encoder, random, valid);
  return Signed<kWay == Way::kIntegerRounded>(half, y, encoder, element);
}

template <Way kWay, class T>
MX_INLINE __m512 Scaled(const T* x, float factor) {
  const __m512 scale = _mm512_set1_ps(factor);
  return kWay == Way::kFloatDivided ? _mm512_div_ps(Load(x), scale) : _mm512_mul_ps(Load(x), scale);
}

// Four vectors of codes as 64 bytes in order.
template <Way kWay>
MX_INLINE __m512i Narrow(__m512i a, __m512i b, __m512i c, __m512i d, const Encoder& encoder) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i bytes;
  if (kWay == Way::kInteger) {
    bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    bytes = _mm512_max_epi8(bytes, encoder.lowest);
  } else {
    bytes = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
  }
  return _mm512_permutexvar_epi32(order, bytes);
}

// Writes 64 codes and returns what follows.
MX_INLINE uint8_t* Store(uint8_t* out, __m512i codes, const Encoder& encoder) {
  if (encoder.stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), codes);
  } else {
    _mm512_storeu_si512(out, codes);
  }
  return out + 64;
}

// Scales of up to sixteen blocks.
struct GroupScales {
  alignas(64) float factor[kGroup];
  alignas(64) uint32_t stored[kGroup];
  __mmask16 nan;
  // For NearestWords, twice in each lane; not for blocks so small that bfloat16 is subnormal there.
  alignas(64) uint32_t octave[kGroup];
  alignas(64) uint32_t smallest[kGroup];
  __mmask16 tiny;
};

MX_INLINE __m512i Twice(__m512i low) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(low, 16));
}

// The smallest byte of a scale for which no subnormal bfloat16 comes near half a code.
constexpr int kSmallestByteForWords = 20;

MX_INLINE void FindWordScales(__m512i amax, const Encoder& encoder, GroupScales* scales) {
  const __m512i bytes = _mm512_load_si512(scales->stored);
  // Zeros are no significands, though their block has the smallest scale: all is shifted out.
  const __m512i smallest = _mm512_mask_mov_epi32(
      _mm512_add_epi32(bytes, encoder.emin), _mm512_testn_epi32_mask(amax, amax), Set(255));
  const __m512i octave = _mm512_slli_epi32(_mm512_sub_epi32(smallest, Set(1)), 7);
  _mm512_store_si512(scales->smallest, Twice(smallest));
  _mm512_store_si512(scales->octave, Twice(octave));
  const __mmask16 low = _mm512_cmplt_epi32_mask(bytes, Set(kSmallestByteForWords));
  scales->tiny = _mm512_mask_test_epi32_mask(low, amax, amax);
}

// Bytes and factors of a power-of-two scale; see E8m0OfAmax.
MX_INLINE void FindExponents(__m512i amax, const ScaleRule& rule, GroupScales* scales) {
  const __m512i raised = _mm512_add_epi32(amax, Set((1 << 23) - rule.threshold));
  __m512i bytes = _mm512_sub_epi32(_mm512_srli_epi32(raised, 23), Set(rule.emax));
  bytes = _mm512_min_epi32(_mm512_max_epi32(bytes, Set(0)), Set(254));
  const __mmask16 subnormal = _mm512_cmplt_epi32_mask(amax, Set(kHidden));
  if (MX_UNLIKELY(subnormal != 0)) {
    // Only emax = 0 leaves subnormals a choice.
    const __m512i doubled = _mm512_slli_epi32(_mm512_sub_epi32(amax, Set(1 << 22)), 1);
    const __mmask16 up = rule.emax > 0 ? static_cast<__mmask16>(0)
                                       : _mm512_cmpge_epi32_mask(doubled, Set(rule.threshold));
    bytes = _mm512_mask_mov_epi32(bytes, subnormal, _mm512_maskz_mov_epi32(up, Set(1)));
  }
  // 2^(127 - byte), of which only the last is subnormal.
  const __m512i inverse = _mm512_slli_epi32(_mm512_sub_epi32(Set(254), bytes), 23);
  const __m512i factor = _mm512_max_epi32(inverse, Set(0x00400000));
  scales->nan = _mm512_cmpge_epi32_mask(amax, Set(kInf));
  bytes = _mm512_mask_mov_epi32(bytes, scales->nan, Set(kE8m0Nan));
  _mm512_store_si512(scales->stored, bytes);
  _mm512_store_si512(scales->factor, factor);
}

// Scales in an element format, sixteen at a time; see ScaleOfElement. Floats are handled in the same
// order, each step rounded.
MX_INLINE void FindElementScales(__m512i amax, const ScaleRule& rule, const float* tensor,
                                 GroupScales* scales) {
  const ElementFormat& of = rule.scale_element;
  const int32_t p = of.mantissa_bits;
  const __mmask16 finite = _mm512_cmplt_epi32_mask(amax, Set(kInf));
  __m512 scale = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(finite, amax));
  scale = _mm512_div_ps(scale, _mm512_set1_ps(rule.target));
  if (tensor != nullptr) scale = _mm512_div_ps(scale, _mm512_set1_ps(*tensor));
  const __m512 smallest = _mm512_set1_ps(rule.smallest), largest = _mm512_set1_ps(MaxOf(of));
  // NaN is neither below nor above, and stays.
  scale = _mm512_mask_mov_ps(scale, _mm512_cmp_ps_mask(scale, smallest, _CMP_LT_OQ), smallest);
  scale = _mm512_mask_mov_ps(scale, _mm512_cmp_ps_mask(scale, largest, _CMP_GT_OQ), largest);
  const __mmask16 good = finite & _mm512_cmp_ps_mask(scale, scale, _CMP_ORD_Q);

  const __m512i bits = _mm512_castps_si512(scale);
  const __m512i field =
      _mm512_max_epi32(_mm512_and_si512(bits, Set(kInf)), Set((of.emin + 127) << 23));
  const __m512i number = _mm512_add_epi32(field, Set((23 - p) << 23));
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(scale, _mm512_castsi512_ps(number)));
  const __m512i exponent = _mm512_srlv_epi32(field, Set(23 - p));
  __m512i code = _mm512_add_epi32(_mm512_sub_epi32(sum, number), exponent);
  code = _mm512_sub_epi32(code, Set((of.emin + 127) << p));

  const __m512i normal =
      _mm512_add_epi32(_mm512_sllv_epi32(code, Set(23 - p)), Set((126 + of.emin) << 23));
  const __m512 subnormal =
      _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(SmallestSubnormal(of)));
  const __m512 stored = _mm512_mask_mov_ps(
      subnormal, _mm512_cmpge_epi32_mask(code, Set(1 << p)), _mm512_castsi512_ps(normal));
  const __m512 one = _mm512_set1_ps(tensor == nullptr ? 1.0f : 1.0f / *tensor);
  _mm512_store_ps(scales->factor, _mm512_div_ps(one, stored));
  _mm512_store_si512(scales->stored, _mm512_mask_mov_epi32(Set(of.nan_code), good, code));
  scales->nan = static_cast<__mmask16>(~good);
}

MX_INLINE void FindScales(__m512i amax, int64_t count, const ScaleRule& rule, const float* tensor,
                          GroupScales* scales) {
  if (rule.kind == ScaleFormatKind::kExponent) return FindExponents(amax, rule, scales);
  if (rule.kind == ScaleFormatKind::kElement && IsSimple(rule.scale_element) &&
      !rule.scale_element.is_integer && (tensor == nullptr || *tensor > 0.0f)) {
    return FindElementScales(amax, rule, tensor, scales);
  }
  alignas(64) uint32_t each[kGroup];
  _mm512_store_si512(each, amax);
  scales->nan = 0;
  for (int64_t i = 0; i < count; ++i) {
    const BlockScale scale = ScaleOf(each[i], rule, tensor);
    scales->stored[i] = scale.stored;
    scales->factor[i] = scale.factor;
    if (scale.is_nan) scales->nan = static_cast<__mmask16>(scales->nan | 1 << i);
  }
}

MX_INLINE bool AreFinite(const GroupScales& scales, int64_t count) {
  const __m512i pattern = _mm512_and_si512(_mm512_load_si512(scales.factor), Set(kAbs));
  const __mmask16 all = static_cast<__mmask16>((1u << count) - 1);
  const __mmask16 special = _mm512_cmpge_epi32_mask(pattern, Set(kInf));
  return (special & all & ~scales.nan) == 0;
}

MX_INLINE void StoreScales(const QuantizePlan& plan, const GroupScales& scales, int64_t index,
                           int64_t count) {
  const __mmask16 valid = static_cast<__mmask16>((1u << count) - 1);
  const __m512i stored = _mm512_load_si512(scales.stored);
  if (plan.rule.kind == ScaleFormatKind::kExponent || plan.rule.kind == ScaleFormatKind::kElement) {
    const __m128i bytes = _mm512_cvtepi32_epi8(stored);
    _mm_mask_storeu_epi8(static_cast<uint8_t*>(plan.scales) + index, valid, bytes);
  } else {
    _mm512_mask_storeu_epi32(static_cast<uint32_t*>(plan.scales) + index, valid, stored);
  }
}

// Sixteen vectors of magnitudes to one vector of their maxima.
MX_INLINE __m512i MaximaOf(const __m512i (&v)[kGroup]) {
  __m512i pair[8], quad[4];
  for (int i = 0; i < 8; ++i) {
    pair[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                               _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  for (int i = 0; i < 4; ++i) {
    quad[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]),
                               _mm512_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]));
  }
  // Each quarter of quad[i] holds partial maxima of vectors 4 i .. 4 i + 3.
  const __m512i low = _mm512_max_epi32(_mm512_shuffle_i32x4(quad[0], quad[1], 0x88),
                                       _mm512_shuffle_i32x4(quad[0], quad[1], 0xdd));
  const __m512i high = _mm512_max_epi32(_mm512_shuffle_i32x4(quad[2], quad[3], 0x88),
                                        _mm512_shuffle_i32x4(quad[2], quad[3], 0xdd));
  return _mm512_max_epi32(_mm512_shuffle_i32x4(low, high, 0x88),
                          _mm512_shuffle_i32x4(low, high, 0xdd));
}

// Codes of 32 bfloat16 that share a scale, in the high bytes of words, before saturation and without
// signs. A bfloat16 has no more than 8 significant bits, so everything fits 16-bit integers:
//
//   above     pattern less that of the octave below the smallest normal, with 8 bits of fraction
//             below a code: for normal codes, the code itself
//   below     significand shifted down by the octaves that it lies below the smallest normal: for
//             subnormal codes, the code itself
//
// Each is the larger one in its own range. Bits that a shift loses are below a quarter of a code.
MX_INLINE __m512i NearestWords(__m512i x, __m512i octave, __m512i smallest,
                               const Encoder& encoder) {
  const __m512i magnitude = _mm512_and_si512(x, Set(0x7fff7fff));
  const __m512i above =
      _mm512_sllv_epi16(_mm512_subs_epu16(magnitude, octave), encoder.word_shift);
  const __m512i octaves = _mm512_subs_epu16(smallest, _mm512_srli_epi16(magnitude, 7));
  const __m512i significand = _mm512_ternarylogic_epi32(
      _mm512_sllv_epi16(x, encoder.word_shift), encoder.word_fraction, encoder.word_hidden, 0xea);
  const __m512i below = _mm512_srlv_epi16(significand, octaves);
  const __m512i code = _mm512_max_epi16(above, below);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(code, 8), Set(0x00010001));
  return _mm512_srli_epi16(
      _mm512_add_epi16(_mm512_add_epi16(code, Set(0x007f007f)), odd), 8);
}

// Saturated codes of two vectors with their signs, as bytes in the order of packing.
MX_INLINE __m512i WordsToBytes(__m512i low, __m512i high, __m512i a, __m512i b,
                               const Encoder& encoder) {
  const __m512i half = _mm512_min_epu8(_mm512_packus_epi16(low, high), encoder.byte_top);
  // Saturation keeps the sign, in bit 7; narrower codes have theirs further down.
  const __m512i sign = _mm512_srlv_epi16(_mm512_packs_epi16(a, b), encoder.byte_sign_counts);
  return _mm512_ternarylogic_epi32(encoder.byte_sign, sign, half, 0xca);
}

MX_INLINE Way WayOf(const QuantizePlan& plan) {
  const bool nearest = plan.rounding == Rounding::kNearest;
  if (plan.element.is_integer) return nearest ? Way::kInteger : Way::kIntegerRounded;
  if (!nearest) return Way::kFloatRounded;
  if (plan.rule.kind == ScaleFormatKind::kExponent) return Way::kFloat;
  return plan.rule.kind == ScaleFormatKind::kMultiplier ? Way::kFloatDivided : Way::kFloatWide;
}

template <Way kWay>
struct Known {
  static constexpr Way value = kWay;
};

// Calls `run` with the way of a plan, known while compiling.
template <class Run>
MX_INLINE void ByWay(const QuantizePlan& plan, const Run& run) {
  switch (WayOf(plan)) {
    case Way::kFloat:
      return run(Known<Way::kFloat>());
    case Way::kFloatWide:
      return run(Known<Way::kFloatWide>());
    case Way::kFloatDivided:
      return run(Known<Way::kFloatDivided>());
    case Way::kInteger:
      return run(Known<Way::kInteger>());
    case Way::kFloatRounded:
      return run(Known<Way::kFloatRounded>());
    case Way::kIntegerRounded:
      return run(Known<Way::kIntegerRounded>());
  }
}

// Whether the element has a plain sign, and scales that fit the way of rounding.
MX_INLINE bool SuitsVectors(const QuantizePlan& plan) {
  if (!IsSimple(plan.element)) return false;
  if (plan.rule.kind == ScaleFormatKind::kExponent) return true;
  if (plan.element.is_integer) return false;
  // What divides is rounded to nearest alone.
  return plan.rounding == Rounding::kNearest || plan.rule.kind != ScaleFormatKind::kMultiplier;
}

// Whether every 64 columns of codes are a line of memory, and large results may go past the caches.
MX_INLINE bool Streams(const QuantizePlan& plan) {
  const int64_t stride = plan.inner == 1 ? plan.length : plan.inner;
  return plan.streams && stride % 64 == 0 && reinterpret_cast<uintptr_t>(plan.codes) % 64 == 0;
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_VECTORS_AVX512_INL_H_
