// Blocks of 16 << n contiguous values with AVX-512: the largest magnitudes of sixteen blocks fill
// one vector, so that scales are computed side by side. What is left over, and what is rare, goes
// through the plain loops.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_ROWS_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_ROWS_AVX512_INL_H_

#include "casts/vectors_avx512-inl.h"
#if MX_RANK >= MX_RANK_avx512_vbmi
#include "casts/table_vbmi-inl.h"
#endif

namespace mx::MX_TARGET {
namespace {

// Lanes' largest magnitudes of one block of kVectors vectors, or of `vectors` where it is 0.
template <int kVectors, class T>
MX_INLINE __m512i BlockMagnitudes(const T* x, int64_t vectors) {
  const __m512i abs = Set(kAbs);
  __m512i largest = _mm512_and_si512(_mm512_castps_si512(Load(x)), abs);
  const int64_t count = kVectors != 0 ? kVectors : vectors;
  for (int64_t i = 1; i < count; ++i) {
    const __m512i next = _mm512_castps_si512(Load(x + i * kLanes));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(next, abs));
  }
  return largest;
}

template <int kVectors>
MX_INLINE __m512i BlockMagnitudes(const Bf16* x, int64_t vectors) {
  const __m512i abs = Set(0x7fff7fff);
  const int64_t pairs = (kVectors != 0 ? kVectors : vectors) / 2;
  if (pairs == 0) {
    return _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_and_si256(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), _mm256_set1_epi16(0x7fff))),
        16);
  }
  __m512i largest = _mm512_and_si512(_mm512_loadu_si512(x), abs);
  for (int64_t i = 1; i < pairs; ++i) {
    largest = _mm512_max_epi16(largest,
                               _mm512_and_si512(_mm512_loadu_si512(x + 2 * kLanes * i), abs));
  }
  const __m512i odd = _mm512_and_si512(largest, Set(0x7fff0000));
  return _mm512_max_epi32(odd, _mm512_slli_epi32(largest, 16));
}

// A run of whole blocks, contiguous, in one tensor.
struct Segment {
  int64_t block;  // index of the first
  int64_t count;
  int64_t start;  // its first element
  const float* tensor;
};

// The first of n contiguous values that NearestWords encodes, and how many they are.
template <Way kWay, class T>
MX_INLINE int64_t EncodePairs(const T*, int64_t, int, const GroupScales&, const Encoder&,
                              uint8_t**) {
  return 0;
}
template <Way kWay>
MX_INLINE int64_t EncodePairs(const Bf16* x, int64_t n, int shift, const GroupScales& scales,
                              const Encoder& encoder, uint8_t** out) {
  if (kWay != Way::kFloat || shift < 1 || scales.tiny != 0) return 0;
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const int64_t first = (i / kLanes) >> shift, second = (i / kLanes + 2) >> shift;
    const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 32);
    const __m512i low = NearestWords(a, Set(static_cast<int32_t>(scales.octave[first])),
                                     Set(static_cast<int32_t>(scales.smallest[first])), encoder);
    const __m512i high = NearestWords(b, Set(static_cast<int32_t>(scales.octave[second])),
                                      Set(static_cast<int32_t>(scales.smallest[second])), encoder);
    const __m512i codes = WordsToBytes(low, high, a, b, encoder);
    *out = Store(*out, _mm512_permutexvar_epi64(order, codes), encoder);
  }
  return i;
}

// Codes of n contiguous values, n a multiple of 16; vectors per block: 1 << shift.
template <class T, Way kWay>
MX_INLINE void EncodeGroup(const T* x, int64_t n, int shift, const GroupScales& scales,
                           const Encoder& encoder, const ElementFormat& element,
                           const int32_t* random, uint8_t* out) {
  const float* factor = scales.factor;
  int64_t i = EncodePairs<kWay>(x, n, shift, scales, encoder, &out);
#if MX_RANK >= MX_RANK_avx512_vbmi
  i = EncodeByTable<kWay>(x, n, shift, scales, element, encoder, &out);
#endif
  for (; i + 64 <= n; i += 64) {
    __m512i codes[4];
    for (int v = 0; v < 4; ++v) {
      const int64_t at = i + v * kLanes;
      const __m512 y = Scaled<kWay>(x + at, factor[(at / kLanes) >> shift]);
      codes[v] = Codes<kWay>(y, encoder, element, random + at, 0xffff);
    }
    const __m512i bytes = Narrow<kWay>(codes[0], codes[1], codes[2], codes[3], encoder);
    out = Store(out, bytes, encoder);
  }
  if (i == n) return;
  __m512i codes[4];
  for (int v = 0; v < 4; ++v) {
    const int64_t at = i + v * kLanes;
    codes[v] = Set(0);
    if (at >= n) continue;
    const __m512 y = Scaled<kWay>(x + at, factor[(at / kLanes) >> shift]);
    codes[v] = Codes<kWay>(y, encoder, element, random + at, 0xffff);
  }
  alignas(64) uint8_t last[64];
  _mm512_store_si512(last, Narrow<kWay>(codes[0], codes[1], codes[2], codes[3], encoder));
  memcpy(out, last, static_cast<size_t>(n - i));
}

// Rare: NaN codes over what was written for NaN blocks.
MX_INLINE void OverwriteNan(const QuantizePlan& plan, const GroupScales& scales, int64_t count,
                            uint8_t* out) {
  // Formats without a NaN write 0.
  const int code = NanCode(plan);
  for (int64_t i = 0; i < count; ++i) {
    if (scales.nan >> i & 1) memset(out + i * plan.block, code, static_cast<size_t>(plan.block));
  }
}

// Rarer: a factor that left float32's range, whose products may be NaN.
template <class T>
void RepairGroup(const QuantizePlan& plan, const GroupScales& scales, const T* x, int64_t count,
                 const int32_t* random, uint8_t* out) {
  float values[kPiece];
  for (int64_t i = 0; i < count; ++i) {
    if (IsFinite(scales.factor[i]) || (scales.nan >> i & 1)) continue;
    CopyWidened(x + i * plan.block, plan.block, values);
    const int32_t* drawn = random == nullptr ? nullptr : random + i * plan.block;
    EncodeAny<false>(values, plan.block, scales.factor + i, false, plan, drawn, out + i * plan.block);
  }
}

template <class T, Way kWay, int kVectors>
MX_INLINE void EncodeSegment(const QuantizePlan& plan, const Encoder& encoder, Segment segment) {
  const T* x = static_cast<const T*>(plan.x) + segment.start;
  uint8_t* out = plan.codes + segment.start;
  const int32_t* random =
      kWay == Way::kFloatRounded || kWay == Way::kIntegerRounded
          ? plan.random_bits + (plan.random_bits == nullptr ? 0 : segment.start)
          : nullptr;
  const int64_t vectors = plan.block / kLanes;
  const int shift = __builtin_ctzll(static_cast<unsigned long long>(vectors));
  while (segment.count > 0) {
    const int64_t count = segment.count < kGroup ? segment.count : kGroup;
    __m512i magnitudes[kGroup];
    if (MX_LIKELY(count == kGroup)) {
      for (int i = 0; i < kGroup; ++i) {
        magnitudes[i] = BlockMagnitudes<kVectors>(x + i * plan.block, vectors);
      }
    } else {
      for (int i = 0; i < kGroup; ++i) {
        magnitudes[i] =
            i < count ? BlockMagnitudes<kVectors>(x + i * plan.block, vectors) : Set(0);
      }
    }
    GroupScales scales;
    const __m512i amax = MaximaOf(magnitudes);
    FindScales(amax, count, plan.rule, segment.tensor, &scales);
    if (kWay == Way::kFloat) FindWordScales(amax, encoder, &scales);
    StoreScales(plan, scales, segment.block, count);
    const int64_t n = count * plan.block;
    EncodeGroup<T, kWay>(x, n, shift, scales, encoder, plan.element, random, out);
    if (MX_UNLIKELY(scales.nan != 0)) OverwriteNan(plan, scales, count, out);
    constexpr bool kMayLeave = kWay == Way::kFloatWide || kWay == Way::kFloatRounded;
    if (kMayLeave && MX_UNLIKELY(!AreFinite(scales, count))) {
      RepairGroup<T>(plan, scales, x, count, random, out);
    }
    x += n;
    if (random != nullptr) random += n;
    out += n;
    segment.block += count;
    segment.count -= count;
  }
}

template <class T>
constexpr bool kIsF16 = false;
template <>
constexpr bool kIsF16<F16> = true;

template <class T, Way kWay>
void EncodeSegmentOfAnyBlock(const QuantizePlan& plan, const Encoder& encoder,
                             const Segment& segment) {
  // The usual blocks of what is cast most have code of their own.
  constexpr bool kOften = kWay == Way::kFloat || kWay == Way::kFloatWide || kWay == Way::kInteger;
  if constexpr (kOften && !kIsF16<T>) {
    if (plan.block == 2 * kLanes) return EncodeSegment<T, kWay, 2>(plan, encoder, segment);
    if (plan.block == kLanes) return EncodeSegment<T, kWay, 1>(plan, encoder, segment);
  }
  return EncodeSegment<T, kWay, 0>(plan, encoder, segment);
}

template <class T>
void EncodeSegmentAnyWay(const QuantizePlan& plan, const Encoder& encoder,
                         const Segment& segment) {
#if MX_RANK >= MX_RANK_avx512_vbmi
  // Tables are for scales that are no powers of two; avx512 has the other ways.
  EncodeSegmentOfAnyBlock<T, Way::kFloatWide>(plan, encoder, segment);
#else
  ByWay(plan, [&](auto way) { EncodeSegmentOfAnyBlock<T, way.value>(plan, encoder, segment); });
#endif
}

// Whether rows suit them too: blocks of 16 << n.
MX_INLINE bool RowsSuitVectors(const QuantizePlan& plan) {
  const int64_t block = plan.block;
  return block >= kLanes && block <= kPiece && (block & (block - 1)) == 0 && SuitsVectors(plan);
}

template <class T>
void VectorRowBlocks(const QuantizePlan& plan, int64_t begin, int64_t end) {
  const Encoder encoder = EncoderOf(plan);
  const bool flat = plan.length % plan.block == 0 && plan.num_tensor_scales <= 1;
  ForRuns(
      plan, flat, begin, end,
      [&](int64_t block, int64_t count, int64_t row, int64_t start) {
        EncodeSegmentAnyWay<T>(plan, encoder, {block, count, start, TensorScale(plan, row)});
      },
      [&](int64_t block) { RowBlocks<T>(plan, block, block + 1); });
}

// Of a plan that suits vectors.
void VectorRows(const QuantizePlan& plan, int64_t begin, int64_t end) {
  ByType(plan.type, [&](auto x) { VectorRowBlocks<decltype(x)>(plan, begin, end); });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_ROWS_AVX512_INL_H_
