// The kernels of optimizers' moments, compiled for each instruction set: see common/target.h. The
// bits are those of mx_jax/reference/moments.py, as XLA computes them: subnormals count as zeros, and
// the last product of a moment and its sum are one rounding.
#include <math.h>

#include "casts/float_types.h"
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
constexpr int32_t kBias = 120 << 3;                           // of a code's exponent, in codes
constexpr int32_t kOne = 127 << 23, kSixtyFour = 133 << 23;
constexpr int32_t kLargest = (135 << 23) | 0x600000;          // 448
constexpr int32_t kLargestSquare = (144 << 23) | 0x440000;    // 448^2
constexpr int32_t kSmallestSquare = (127 - 12) << 23;         // (2^-6)^2
constexpr uint32_t kFirst = 0x9E3779B1u, kLast = 0x735A2D97u; // of the hash

// The exponent byte of a block by the pattern of its largest magnitude: 448 or less remains of it. Of
// roots the pattern is the square's.
template <bool kRoot>
MX_INLINE int32_t ExponentOf(uint32_t amax) {
  if (amax >= kInf) return 255;
  const int32_t own = static_cast<int32_t>(amax);
  if (kRoot) return 127 + ((((own + (kMantissa - 0x440000)) >> 23) - 143) >> 1);
  const int32_t exponent = ((own + (kMantissa - 0x600000)) >> 23) - 8;
  return exponent < 1 ? 1 : exponent;
}

// What codes of a block with this exponent byte are multiplied by; NaN of 255.
MX_INLINE float FactorOf(int32_t exponent) {
  return FloatOf(exponent == 255 ? kInf | 1 : static_cast<uint32_t>(exponent) << 23);
}

// What values are multiplied by before they become codes.
MX_INLINE float InverseOf(int32_t exponent) {
  return FloatOf(static_cast<uint32_t>(254 - exponent) << 23);
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
    // Sign, exponent and mantissa where float16 has them, 2^8 too small.
    const __m512 factor = SetPs(256.0f * FactorOf(plan.scales[block]));
    const __m256i own = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(own), 7);
    wide = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<int16_t>(~0x4000)));
    x[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(wide)), factor);
    x[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(wide, 1)), factor);
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

template <bool kRoot>
MX_INLINE __m512i ExponentsOf(__m512i amax) {
  const __mmask16 special = _mm512_cmpge_epu32_mask(amax, Set(kInf));
  __m512i found;
  if (kRoot) {
    found = _mm512_srli_epi32(_mm512_add_epi32(amax, Set(kMantissa - 0x440000)), 23);
    found = _mm512_srai_epi32(_mm512_sub_epi32(found, Set(143)), 1);
    found = _mm512_add_epi32(found, Set(127));
  } else {
    found = _mm512_srli_epi32(_mm512_add_epi32(amax, Set(kMantissa - 0x600000)), 23);
    found = _mm512_max_epi32(_mm512_sub_epi32(found, Set(8)), Set(1));
  }
  return _mm512_mask_mov_epi32(found, special, Set(255));
}

// Codes as 32-bit numbers; `hash` has random bits at its top.
MX_INLINE __m512i CodesOfValues(__m512 x, __m512 inverse, __m512i hash) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512 magnitude =
      _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(bits, Set(0x7fffffff))), inverse);
  const __m512i missing = _mm512_castps_si512(_mm512_sub_ps(SetPs(0.015625f), magnitude));
  const __m512 positive = _mm512_castsi512_ps(_mm512_max_epi32(missing, Set(0)));
  const __m512 even = _mm512_fmadd_ps(SetPs(0.5f), positive, magnitude);
  __m512i found = _mm512_min_epi32(_mm512_castps_si512(even), Set(kLargest));
  found = _mm512_add_epi32(found, _mm512_srli_epi32(hash, 12));
  found = _mm512_sub_epi32(_mm512_srli_epi32(found, 20), Set(kBias));
  // Or the sign: found | (bits >> 24 & 0x80).
  return _mm512_ternarylogic_epi32(found, _mm512_srli_epi32(bits, 24), Set(0x80), 0xf8);
}

MX_INLINE __m512i CodesOfRoots(__m512 x, __m512 inverse, __m512i hash) {
  const __m512 square = _mm512_mul_ps(_mm512_mul_ps(x, inverse), inverse);
  __m512i own = _mm512_max_epi32(_mm512_castps_si512(square), Set(kSmallestSquare));
  own = _mm512_sub_epi32(_mm512_min_epi32(own, Set(kLargestSquare)), Set(kOne));
  // The square in [64, 256), by four to some power; its first bits tell the root up to one more.
  const __m512 one = _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_and_si512(own, Set(0xffffff)), Set(kSixtyFour)));
  const __m512i index = _mm512_srli_epi32(own, 20);
  const __m512 next = _mm512_permutexvar_ps(
      index, _mm512_setr_ps(512, 512, 81, 512, 100, 512, 512, 121, 512, 512, 169, 512, 196, 512, 225, 512));
  __m512 m = _mm512_permutexvar_ps(
      index, _mm512_setr_ps(8, 8, 8, 9, 9, 10, 10, 10, 11, 12, 12, 13, 13, 14, 14, 15));
  m = _mm512_mask_add_ps(m, _mm512_cmp_ps_mask(one, next, _CMP_GE_OQ), m, SetPs(1.0f));
  const __m512 above = _mm512_fnmadd_ps(m, m, one);
  const __m512 gap = _mm512_fmadd_ps(m, SetPs(2.0f), SetPs(1.0f));
  const __m512 random = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(hash, 14)),
                                        SetPs(0x1p-18f), SetPs(0x1p-19f));
  const __mmask16 up = _mm512_cmp_ps_mask(above, _mm512_mul_ps(random, gap), _CMP_GT_OQ);
  // 8 floor(exponent / 2) + m + 48: what is shifted away is less than a code.
  __m512i found = _mm512_slli_epi32(_mm512_srai_epi32(own, 24), 3);
  found = _mm512_add_epi32(found, _mm512_cvttps_epi32(_mm512_add_ps(m, SetPs(48.0f))));
  return _mm512_mask_add_epi32(found, up, found, Set(1));
}

template <bool kRoot, bool kSquare>
void Step(const MomentPlan& plan, int64_t begin, int64_t end) {
  const __m512i first = Set(static_cast<int32_t>(plan.words[0]));
  const __m512i second = Set(static_cast<int32_t>(plan.words[1] | 1));
  const __m512i last = Set(static_cast<int32_t>(kLast));
  const __m512i lanes = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      Set(static_cast<int32_t>(kFirst)));
  for (int64_t group = begin; group < end; group += kGroup) {
    const int count = static_cast<int>(end - group < kGroup ? end - group : kGroup);
    __m512 moments[2 * kGroup];
    __m512i largest[kGroup];
    for (int i = 0; i < count; ++i) {
      Next<kRoot, kSquare>(plan, group + i, moments + 2 * i);
      __m512i low = _mm512_castps_si512(moments[2 * i]);
      __m512i high = _mm512_castps_si512(moments[2 * i + 1]);
      if (!kRoot) {
        low = _mm512_and_si512(low, Set(0x7fffffff));
        high = _mm512_and_si512(high, Set(0x7fffffff));
      }
      largest[i] = MaxU(low, high);
    }
    for (int i = count; i < kGroup; ++i) largest[i] = _mm512_setzero_si512();
    const __m512i exponents = ExponentsOf<kRoot>(LargestOfEach(largest));
    const __mmask16 whole = static_cast<__mmask16>((1u << count) - 1);
    _mm_mask_storeu_epi8(plan.out_scales + group, whole, _mm512_cvtepi32_epi8(exponents));
    alignas(64) float inverses[kGroup];
    _mm512_store_ps(inverses, _mm512_castsi512_ps(_mm512_slli_epi32(
                                  _mm512_sub_epi32(Set(254), exponents), 23)));
    for (int i = 0; i < count; ++i) {
      const uint32_t place = static_cast<uint32_t>((group + i) * kMomentBlock);
      __m512i hash = _mm512_add_epi32(
          lanes, _mm512_add_epi32(first, Set(static_cast<int32_t>(place * kFirst))));
      hash = _mm512_mullo_epi32(_mm512_xor_si512(hash, _mm512_srli_epi32(hash, 16)), second);
      hash = _mm512_mullo_epi32(_mm512_xor_si512(hash, _mm512_srli_epi32(hash, 15)), last);
      hash = _mm512_xor_si512(hash, _mm512_srli_epi32(hash, 16));
      const __m512i turned = _mm512_rol_epi32(hash, 16);
      const __m512 inverse = SetPs(inverses[i]);
      const __m512i low = kRoot ? CodesOfRoots(moments[2 * i], inverse, hash)
                                : CodesOfValues(moments[2 * i], inverse, hash);
      const __m512i high = kRoot ? CodesOfRoots(moments[2 * i + 1], inverse, turned)
                                 : CodesOfValues(moments[2 * i + 1], inverse, turned);
      uint8_t* out = plan.out_codes + (group + i) * kMomentBlock;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(low));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out) + 1, _mm512_cvtepi32_epi8(high));
    }
  }
}

#else

// The hash of each half of a block, of which the second takes the same, turned by 16 bits.
MX_INLINE void Hash(const MomentPlan& plan, int64_t block, uint32_t* MX_RESTRICT hash) {
  const uint32_t place = static_cast<uint32_t>(block * kMomentBlock);
  for (int i = 0; i < kLanes; ++i) {
    uint32_t mixed = (place + static_cast<uint32_t>(i)) * kFirst + plan.words[0];
    mixed = (mixed ^ (mixed >> 16)) * (plan.words[1] | 1);
    mixed = (mixed ^ (mixed >> 15)) * kLast;
    mixed ^= mixed >> 16;
    hash[i] = mixed;
    hash[kLanes + i] = (mixed << 16) | (mixed >> 16);
  }
}

template <bool kRoot, bool kSquare>
void Step(const MomentPlan& plan, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const uint8_t* codes = plan.codes + block * kMomentBlock;
    const float* added = plan.added + block * kMomentBlock;
    const float factor = FactorOf(plan.scales[block]);
    float x[kMomentBlock];
    uint32_t amax = 0;
    for (int i = 0; i < kMomentBlock; ++i) {
      if (kRoot) {
        const float root = FloatOf((codes[i] + static_cast<uint32_t>(kBias)) << 20) * factor;
        x[i] = root * root;
      } else {
        const uint32_t half = (static_cast<uint32_t>(codes[i] & 0x80) << 8) |
                              (static_cast<uint32_t>(codes[i] & 0x7f) << 7);
        x[i] = Widen(F16{static_cast<uint16_t>(half)}) * (256.0f * factor);
      }
      const float own = kSquare ? added[i] * added[i] : added[i];
      x[i] = fmaf(plan.add, own, plan.keep * x[i]);
      const uint32_t magnitude = kRoot ? BitsOf(x[i]) : BitsOf(x[i]) & kAbs;
      amax = amax > magnitude ? amax : magnitude;
    }
    const int32_t exponent = ExponentOf<kRoot>(amax);
    plan.out_scales[block] = static_cast<uint8_t>(exponent);
    const float inverse = InverseOf(exponent);
    uint32_t hash[kMomentBlock];
    Hash(plan, block, hash);
    for (int i = 0; i < kMomentBlock; ++i) {
      int32_t code;
      if (kRoot) {
        int32_t own = static_cast<int32_t>(BitsOf(x[i] * inverse * inverse));
        own = own < kSmallestSquare ? kSmallestSquare : own;
        own = (own > kLargestSquare ? kLargestSquare : own) - kOne;
        // The square in [64, 256), by four to some power, and its root.
        const float one = FloatOf(static_cast<uint32_t>((own & 0xffffff) + kSixtyFour));
        const int32_t m = 8 + (one >= 81) + (one >= 100) + (one >= 121) + (one >= 144) +
                          (one >= 169) + (one >= 196) + (one >= 225);
        const float above = one - static_cast<float>(m * m);
        const float random = static_cast<float>(static_cast<int32_t>(hash[i] >> 14)) * 0x1p-18f + 0x1p-19f;
        const bool up = above > random * static_cast<float>(2 * m + 1);
        code = ((own >> 24) << 3) + m + 48 + up;
      } else {
        const float magnitude = FloatOf(BitsOf(x[i]) & kAbs) * inverse;
        const int32_t missing = static_cast<int32_t>(BitsOf(0.015625f - magnitude));
        const float even = magnitude + 0.5f * FloatOf(static_cast<uint32_t>(missing > 0 ? missing : 0));
        int32_t own = static_cast<int32_t>(BitsOf(even));
        own = (own > kLargest ? kLargest : own) + static_cast<int32_t>(hash[i] >> 12);
        code = static_cast<int32_t>((static_cast<uint32_t>(own) >> 20) - kBias) |
               static_cast<int32_t>((BitsOf(x[i]) >> 24) & 0x80);
      }
      plan.out_codes[block * kMomentBlock + i] = static_cast<uint8_t>(code);
    }
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
