// The kernels of optimizers' moments, compiled for each instruction set: see common/target.h. The
// bits are those of mx_jax/reference/moments.py, as XLA computes them: subnormals count as zeros, and
// the last product of a moment and its sum are one rounding.
#include "casts/moments.h"
#include "common/element_codec.h"
#include "common/float_environment.h"
#include "common/macros.h"
#include "common/target.h"
#if MX_RANK >= MX_RANK_avx512
#include <immintrin.h>
#endif

namespace mx::MX_TARGET {
namespace {

constexpr int kLanes = 16;  // half a block
constexpr int32_t kMantissa = 0x7fffff;
constexpr int32_t kBias = 120 << 3;  // of a code's exponent, in codes
constexpr int32_t kOne = 127 << 23, kSixtyFour = 133 << 23;
constexpr int32_t kLargestSquare = (144 << 23) | 0x440000;     // 448^2
constexpr int32_t kSmallestSquare = (127 - 12) << 23;          // (2^-6)^2
constexpr int32_t kOddsMask = 0x7fffc0, kOdds = kOne | 1 << 5; // 1 + (k + 1/2) 2^-17
constexpr float kHalfOfSmallest = 0x1p-7f;
constexpr uint32_t kFirst = 0x9E3779B1u, kLast = 0x735A2D97u;  // of the hash

// What codes of a block with this exponent byte are multiplied by; NaN of 255.
MX_INLINE float FactorOf(int32_t exponent) {
  return FloatOf(exponent == 255 ? kInf | 1 : static_cast<uint32_t>(exponent) << 23);
}

#if MX_RANK >= MX_RANK_avx512

MX_INLINE __m512i Set(int32_t value) { return _mm512_set1_epi32(value); }
MX_INLINE __m512 SetPs(float value) { return _mm512_set1_ps(value); }

constexpr int kGroup = 16;  // blocks whose scales are computed together

// The next moment of a block: its halves.
template <bool kRoot, bool kSquare>
MX_INLINE void Next(const MomentPlan& plan, int64_t block, __m512 out[2]) {
  const uint8_t* codes = plan.codes + block * kMomentBlock;
  const float* added = plan.added + block * kMomentBlock;
  __m512 x[2];
  if (kRoot) {
    const __m512 factor = SetPs(FactorOf(plan.scales[block]));
    for (int half = 0; half < 2; ++half) {
      const __m128i own = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + half);
      const __m512i wide = _mm512_add_epi32(_mm512_cvtepu8_epi32(own), Set(kBias));
      const __m512 root = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 20)), factor);
      x[half] = _mm512_mul_ps(root, root);
    }
  } else {
    // Sign, exponent and mantissa where float16 has them, 2^8 too small: by 2^4 twice, since the
    // factor of the largest moments has no 2^8 left.
    const __m512 sixteen = SetPs(16.0f), factor = SetPs(16.0f * FactorOf(plan.scales[block]));
    const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(own), 7);
    wide = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<int16_t>(~0x4000)));
    x[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(wide)), sixteen);
    x[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(wide, 1)), sixteen);
    for (__m512& own : x) own = _mm512_mul_ps(own, factor);
  }
  const __m512 keep = SetPs(plan.keep), add = SetPs(plan.add);
  for (int half = 0; half < 2; ++half) {
    __m512 own = _mm512_loadu_ps(added + half * kLanes);
    if (kSquare) own = _mm512_mul_ps(own, own);
    out[half] = _mm512_fmadd_ps(add, own, _mm512_mul_ps(keep, x[half]));
  }
}

MX_INLINE __m512i MaxU(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }

// The largest lane of each of sixteen vectors.
MX_INLINE __m512i LargestOfEach(const __m512i v[kGroup]) {
  __m512i w[8], u[4], t[2];
  for (int i = 0; i < 8; ++i) {
    w[i] = MaxU(_mm512_unpacklo_epi32(v[i], v[i + 8]), _mm512_unpackhi_epi32(v[i], v[i + 8]));
  }
  for (int i = 0; i < 4; ++i) {
    u[i] = MaxU(_mm512_unpacklo_epi32(w[i], w[i + 4]), _mm512_unpackhi_epi32(w[i], w[i + 4]));
  }
  // Now each group of four lanes has the lanes of vectors i, i + 4, i + 8 and i + 12.
  for (int i = 0; i < 2; ++i) {
    t[i] = MaxU(_mm512_shuffle_i32x4(u[2 * i], u[2 * i + 1], 0x88),
                _mm512_shuffle_i32x4(u[2 * i], u[2 * i + 1], 0xdd));
  }
  const __m512i last = MaxU(_mm512_shuffle_i32x4(t[0], t[1], 0x88),
                            _mm512_shuffle_i32x4(t[0], t[1], 0xdd));
  // Lane 4 i + j is of vector i + 4 j.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, last);
}

// The exponent bytes of sixteen blocks by the patterns of their largest magnitudes: 448 or less remains
// of these. Of roots the patterns are the squares'.
template <bool kRoot>
MX_INLINE __m512i ExponentsOf(__m512i amax) {
  const __mmask16 special = _mm512_cmpge_epu32_mask(amax, Set(kInf));
  __m512i found;
  if (kRoot) {
    found = _mm512_srli_epi32(_mm512_add_epi32(amax, Set(kMantissa - 0x440000)), 23);
    found = _mm512_srai_epi32(_mm512_sub_epi32(found, Set(143)), 1);
    found = _mm512_add_epi32(found, Set(127));
    found = _mm512_mask_mov_epi32(found, _mm512_cmplt_epu32_mask(amax, Set(kHidden)), Set(1));
  } else {
    found = _mm512_srli_epi32(_mm512_add_epi32(amax, Set(kMantissa - 0x600000)), 23);
    found = _mm512_max_epi32(_mm512_sub_epi32(found, Set(8)), Set(1));
  }
  return _mm512_mask_mov_epi32(found, special, Set(255));
}

// What a block's values are multiplied by, or what is added to patterns of squares, for codes.
template <bool kRoot>
MX_INLINE __m512i InversesOf(__m512i exponents) {
  return kRoot ? _mm512_slli_epi32(_mm512_sub_epi32(Set(127), exponents), 24)
               : _mm512_slli_epi32(_mm512_sub_epi32(Set(254), exponents), 23);
}

// Codes of values without their signs, plus kBias; `hash` has random bits at its top.
MX_INLINE __m512i CodeOfValue(__m512 x, __m512i inverse, __m512i hash) {
  const __m512 positive = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), Set(0x7fffffff)));
  const __m512 magnitude = _mm512_mul_ps(positive, _mm512_castsi512_ps(inverse));
  const __m512 subnormal = _mm512_fmadd_ps(magnitude, SetPs(0.5f), SetPs(kHalfOfSmallest));
  const __m512i pattern =
      _mm512_max_epi32(_mm512_castps_si512(magnitude), _mm512_castps_si512(subnormal));
  return _mm512_srli_epi32(_mm512_add_epi32(pattern, _mm512_srli_epi32(hash, 12)), 20);
}

MX_INLINE __m512i CodeOfRoot(__m512 x, __m512i inverse, __m512i hash) {
  __m512i own = _mm512_add_epi32(_mm512_castps_si512(x), inverse);
  own = _mm512_min_epi32(_mm512_max_epi32(own, Set(kSmallestSquare)), Set(kLargestSquare));
  own = _mm512_sub_epi32(own, Set(kOne - (7 << 24)));
  // The square in [64, 256), by some power of four. Its first four bits tell the root m, from 8 to 15,
  // up to one more.
  const __m512 square = _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_and_si512(own, Set(0xffffff)), Set(kSixtyFour)));
  const __m512i place = _mm512_srli_epi32(own, 20);
  const __m512 next = _mm512_permutexvar_ps(place, _mm512_setr_ps(512, 512, 81, 512, 100, 512, 512, 121, 512,
                                                                  512, 169, 512, 196, 512, 225, 512));
  __m512i m = _mm512_permutexvar_epi32(
      place, _mm512_setr_epi32(0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7));
  m = _mm512_mask_add_epi32(m, _mm512_cmp_ps_mask(square, next, _CMP_GE_OQ), m, Set(1));
  // 2 m + 1, and m (m - 2) - 1.
  const __m512 gap = _mm512_permutexvar_ps(
      m, _mm512_setr_ps(17, 19, 21, 23, 25, 27, 29, 31, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m512 base = _mm512_permutexvar_ps(
      m, _mm512_setr_ps(47, 62, 79, 98, 119, 142, 167, 194, 0, 0, 0, 0, 0, 0, 0, 0));
  // hash & kOddsMask | kOdds
  const __m512 odds = _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(_mm512_srli_epi32(hash, 9), Set(kOddsMask), Set(kOdds), 0xea));
  const __mmask16 up =
      _mm512_cmp_ps_mask(square, _mm512_fmadd_ps(odds, gap, base), _CMP_GT_OQ);
  // own >> 21 & ~7 | m
  const __m512i code = _mm512_ternarylogic_epi32(_mm512_srai_epi32(own, 21), Set(7), m, 0xba);
  return _mm512_mask_add_epi32(code, up, code, Set(1));
}

// The bytes of sixteen numbers of each vector, up to their order: Ordered has them in a row.
MX_INLINE __m512i Packed(const __m512i v[4]) {
  return _mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]));
}

MX_INLINE __m512i Ordered(__m512i bytes) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
}

// The codes of two blocks.
template <bool kRoot>
MX_INLINE __m512i CodesOf(const __m512 moments[4], const float* inverses, const __m512i hash[2]) {
  __m512i codes[4];
  for (int i = 0; i < 4; ++i) {
    const __m512i own = i & 1 ? _mm512_rol_epi32(hash[i / 2], 16) : hash[i / 2];
    const __m512i inverse = _mm512_castps_si512(SetPs(inverses[i / 2]));
    codes[i] = kRoot ? CodeOfRoot(moments[i], inverse, own) : CodeOfValue(moments[i], inverse, own);
  }
  if (kRoot) return Ordered(Packed(codes));
  const __m512i bias = _mm512_set1_epi16(kBias), seven = _mm512_set1_epi8(0x7f);
  const __m512i left = _mm512_sub_epi16(_mm512_packus_epi32(codes[0], codes[1]), bias);
  const __m512i right = _mm512_sub_epi16(_mm512_packus_epi32(codes[2], codes[3]), bias);
  // With saturation a sign stays one.
  const __m512i* signs = reinterpret_cast<const __m512i*>(moments);
  const __m512i sign = _mm512_packs_epi16(_mm512_packs_epi32(signs[0], signs[1]),
                                          _mm512_packs_epi32(signs[2], signs[3]));
  // seven ? code : sign
  return Ordered(_mm512_ternarylogic_epi32(seven, _mm512_packus_epi16(left, right), sign, 0xca));
}

template <bool kRoot, bool kSquare>
void Step(const MomentPlan& plan, int64_t begin, int64_t end) {
  const __m512i second = Set(static_cast<int32_t>(plan.words[1] | 1));
  const __m512i last = Set(static_cast<int32_t>(kLast));
  const __m512i further = Set(static_cast<int32_t>(kMomentBlock * kFirst));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i counted = _mm512_add_epi32(lanes, Set(static_cast<int32_t>(begin * kMomentBlock)));
  counted = _mm512_add_epi32(_mm512_mullo_epi32(counted, Set(static_cast<int32_t>(kFirst))),
                             Set(static_cast<int32_t>(plan.words[0])));
  __m512 moments[2 * kGroup];
  for (__m512& moment : moments) moment = _mm512_setzero_ps();
  for (int64_t group = begin; group < end; group += kGroup) {
    const int count = static_cast<int>(end - group < kGroup ? end - group : kGroup);
    __m512i largest[kGroup];
    for (int i = 0; i < count; ++i) {
      Next<kRoot, kSquare>(plan, group + i, moments + 2 * i);
      const __m512i low = _mm512_castps_si512(moments[2 * i]);
      const __m512i high = _mm512_castps_si512(moments[2 * i + 1]);
      largest[i] = kRoot ? MaxU(low, high)
                         : MaxU(_mm512_and_si512(low, Set(0x7fffffff)),
                                _mm512_and_si512(high, Set(0x7fffffff)));
    }
    for (int i = count; i < kGroup; ++i) largest[i] = _mm512_setzero_si512();
    const __m512i exponents = ExponentsOf<kRoot>(LargestOfEach(largest));
    const __mmask16 whole = static_cast<__mmask16>((1u << count) - 1);
    _mm_mask_storeu_epi8(plan.out_scales + group, whole, _mm512_cvtepi32_epi8(exponents));
    alignas(64) float inverses[kGroup];
    _mm512_store_ps(inverses, _mm512_castsi512_ps(InversesOf<kRoot>(exponents)));
    for (int i = 0; i < count; i += 2) {
      __m512i hash[2];
      for (__m512i& own : hash) {
        own = _mm512_xor_si512(counted, _mm512_srli_epi32(counted, 16));
        own = _mm512_mullo_epi32(own, second);
        own = _mm512_xor_si512(own, _mm512_srli_epi32(own, 15));
        own = _mm512_mullo_epi32(own, last);
        counted = _mm512_add_epi32(counted, further);
      }
      const __m512i codes = CodesOf<kRoot>(moments + 2 * i, inverses + i, hash);
      uint8_t* out = plan.out_codes + (group + i) * kMomentBlock;
      if (MX_LIKELY(i + 1 < count)) {
        _mm512_storeu_si512(out, codes);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(codes));
      }
    }
  }
}

#else

// The exponent byte of a block by the pattern of its largest magnitude: 448 or less remains of it. Of
// roots the pattern is the square's.
template <bool kRoot>
MX_INLINE int32_t ExponentOf(uint32_t amax) {
  if (amax >= kInf) return 255;
  const int32_t own = static_cast<int32_t>(amax);
  if (kRoot && amax < kHidden) return 1;
  if (kRoot) return 127 + ((((own + (kMantissa - 0x440000)) >> 23) - 143) >> 1);
  const int32_t exponent = ((own + (kMantissa - 0x600000)) >> 23) - 8;
  return exponent < 1 ? 1 : exponent;
}

// The hash of each half of a block, of which the second takes the same, turned by 16 bits.
MX_INLINE void Hash(const MomentPlan& plan, int64_t block, uint32_t* MX_RESTRICT hash) {
  const uint32_t place = static_cast<uint32_t>(block * kMomentBlock);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t mixed = (place + static_cast<uint32_t>(i)) * kFirst + plan.words[0];
    mixed = (mixed ^ (mixed >> 16)) * (plan.words[1] | 1);
    mixed = (mixed ^ (mixed >> 15)) * kLast;
    hash[i] = mixed;
    hash[kLanes + i] = (mixed << 16) | (mixed >> 16);
  }
}

// Patterns of the squares of 9 to 15.
constexpr int32_t k81 = 0x42a20000, k100 = 0x42c80000, k121 = 0x42f20000, k144 = 0x43100000,
                  k169 = 0x43290000, k196 = 0x43440000, k225 = 0x43610000;

// a * b + c, rounded once where the machine does so, as XLA's own kernels.
MX_INLINE float Fused(float a, float b, float c) {
// Clang says __FMA__ alone.
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The next moment of a block. Loops are short and plain, which compilers turn into vectors.
template <bool kRoot, bool kSquare>
MX_INLINE void Next(const MomentPlan& plan, int64_t block, float* MX_RESTRICT x) {
  const uint8_t* codes = plan.codes + block * kMomentBlock;
  const float* added = plan.added + block * kMomentBlock;
  const float factor = FactorOf(plan.scales[block]);
  int32_t code[kMomentBlock];
  for (int i = 0; i < kMomentBlock; ++i) code[i] = codes[i];
  for (int i = 0; i < kMomentBlock; ++i) {
    if (kRoot) {
      const float root = FloatOf(static_cast<uint32_t>((code[i] + kBias) << 20)) * factor;
      x[i] = root * root;
    } else {
      // A subnormal code gets a leading bit of 2^-6, which is taken out again.
      const int32_t half = code[i] & 0x7f;
      const float small = FloatOf(static_cast<uint32_t>(half + kBias + 8) << 20) - 0x1p-6f;
      const float normal = FloatOf(static_cast<uint32_t>(half + kBias) << 20);
      const uint32_t is_small = half < 8 ? 0xffffffffu : 0;
      const uint32_t own = (BitsOf(small) & is_small) | (BitsOf(normal) & ~is_small);
      x[i] = FloatOf(own | static_cast<uint32_t>(code[i] & 0x80) << 24) * factor;
    }
  }
  for (int i = 0; i < kMomentBlock; ++i) {
    const float own = kSquare ? added[i] * added[i] : added[i];
    x[i] = Fused(plan.add, own, plan.keep * x[i]);
  }
}

template <bool kRoot, bool kSquare>
void Step(const MomentPlan& plan, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    float x[kMomentBlock];
    Next<kRoot, kSquare>(plan, block, x);
    uint32_t amax = 0;
    for (int i = 0; i < kMomentBlock; ++i) {
      const uint32_t magnitude = kRoot ? BitsOf(x[i]) : BitsOf(x[i]) & kAbs;
      amax = amax > magnitude ? amax : magnitude;
    }
    const int32_t exponent = ExponentOf<kRoot>(amax);
    plan.out_scales[block] = static_cast<uint8_t>(exponent);
    const float inverse = FloatOf(static_cast<uint32_t>(254 - exponent) << 23);
    const uint32_t shift = static_cast<uint32_t>(127 - exponent) << 24;
    uint32_t hash[kMomentBlock];
    Hash(plan, block, hash);
    int32_t codes[kMomentBlock], squares[kMomentBlock];
    for (int i = 0; i < kMomentBlock; ++i) {
      const int32_t own = static_cast<int32_t>(BitsOf(x[i]) + shift);
      squares[i] = own > kSmallestSquare ? own : kSmallestSquare;
    }
    for (int i = 0; i < kMomentBlock; ++i) {
      squares[i] = squares[i] < kLargestSquare ? squares[i] : kLargestSquare;
    }
    for (int i = 0; i < kMomentBlock; ++i) {
      if (kRoot) {
        const int32_t own = squares[i] - kOne;
        // The square in [64, 256), by some power of four, and the integer of its root.
        const int32_t bits = (own & 0xffffff) + kSixtyFour;
        // Shifts and not comparisons, which compilers make branches of.
        const int32_t m = 15 + ((bits - k81) >> 31) + ((bits - k100) >> 31) +
                          ((bits - k121) >> 31) + ((bits - k144) >> 31) + ((bits - k169) >> 31) +
                          ((bits - k196) >> 31) + ((bits - k225) >> 31);
        const float odds = FloatOf(((hash[i] >> 9) & kOddsMask) | kOdds);
        const float line = odds * static_cast<float>(2 * m + 1) + static_cast<float>(m * (m - 2) - 1);
        codes[i] = (own >> 24) * 8 + m + 48 - ((static_cast<int32_t>(BitsOf(line)) - bits) >> 31);
      } else {
        const float magnitude = FloatOf(BitsOf(x[i]) & kAbs) * inverse;
        const int32_t own = static_cast<int32_t>(BitsOf(magnitude));
        const int32_t subnormal =
            static_cast<int32_t>(BitsOf(magnitude * 0.5f + kHalfOfSmallest));
        const uint32_t pattern = static_cast<uint32_t>(own > subnormal ? own : subnormal);
        codes[i] = static_cast<int32_t>(((((pattern + (hash[i] >> 12)) >> 20) - kBias) & 0x7f) |
                                        ((BitsOf(x[i]) >> 24) & 0x80));
      }
    }
    uint8_t* out = plan.out_codes + block * kMomentBlock;
    for (int i = 0; i < kMomentBlock; ++i) out[i] = static_cast<uint8_t>(codes[i]);
  }
}

#endif

void StepBlocks(const MomentPlan& plan, int64_t begin, int64_t end) {
  FlushSubnormals environment;
  if (plan.is_root) {
    (plan.is_square ? Step<true, true> : Step<true, false>)(plan, begin, end);
  } else {
    (plan.is_square ? Step<false, true> : Step<false, false>)(plan, begin, end);
  }
}

}  // namespace

const MomentKernels kMoments = {StepBlocks};

}  // namespace mx::MX_TARGET
