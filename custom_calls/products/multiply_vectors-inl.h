// A panel by a panel, in vectors of 512 or 256 bits.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_VECTORS_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_VECTORS_INL_H_

#include <immintrin.h>
#include <string.h>

#include "common/target.h"
#if MX_RANK >= MX_RANK_avx512
#include "products/pack_avx512-inl.h"
#define MX_V(name) _mm512_##name
#else
#include "products/pack_avx2-inl.h"
#define MX_V(name) _mm256_##name
#endif

namespace mx::MX_TARGET {
namespace {

using Integers32 = decltype(MX_V(set1_epi32)(0));
using Floats = decltype(MX_V(set1_ps)(0));
constexpr int kWidth = sizeof(Floats) / sizeof(float);
#if MX_RANK >= MX_RANK_avx512
MX_INLINE constexpr int OffsetOf(Element) { return 128; }
#endif

template <PanelType kType>
MX_INLINE Integers32 MultiplyAdd(Integers32 sum, Integers32 rhs, Integers32 word) {
#if MX_RANK >= MX_RANK_avx512_vnni
  if (kType == kInt8) return _mm512_dpbusd_epi32(sum, rhs, word);
  if (kType == kInt16) return _mm512_dpwssd_epi32(sum, rhs, word);
#elif MX_RANK == MX_RANK_avx2_vnni
  if (kType == kInt8) return _mm256_dpbusd_avx_epi32(sum, rhs, word);
  if (kType == kInt16) return _mm256_dpwssd_avx_epi32(sum, rhs, word);
#elif MX_RANK == MX_RANK_avx2
  if (kType == kInt16) return _mm256_add_epi32(sum, _mm256_madd_epi16(rhs, word));
#endif
#if MX_RANK >= MX_RANK_avx512_bf16
  if (kType == kBf16) {
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)rhs, (__m512bh)word);
  }
#endif
  return (Integers32)MX_V(fmadd_ps)((Floats)rhs, (Floats)word, (Floats)sum);
}

// The same of word `g` of a block; kPairs > 0: sums of so many words, of pairs of products of bytes,
// fit int16.
template <PanelType kType, int kPairs>
MX_INLINE void AddWord(int g, Integers32* pairs, Integers32* sum, Integers32 rhs, Integers32 word) {
#if MX_RANK == MX_RANK_avx2
  if constexpr (kPairs > 0) {
    const __m256i two = _mm256_maddubs_epi16(rhs, word);
    *pairs = g % kPairs == 0 ? two : _mm256_add_epi16(*pairs, two);
    asm("" : "+x"(*pairs));
    if (g % kPairs != kPairs - 1) return;
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*pairs, _mm256_set1_epi16(1)));
    asm("" : "+x"(*sum));
    return;
  }
#endif
  (void)g, (void)pairs;
  *sum = MultiplyAdd<kType>(*sum, rhs, word);
#if MX_RANK == MX_RANK_avx2
  // GCC would make all products first and add them in a tree, for which there are no registers.
  asm("" : "+x"(*sum));
#endif
}

template <PanelType kType>
MX_INLINE Floats AsFloat(Integers32 sum) {
  if (kType == kInt8 || kType == kInt16) return MX_V(cvtepi32_ps)(sum);
  return (Floats)sum;
}

template <Scaling kScaling>
MX_INLINE Floats AddScaled(Floats total, Floats sum, Floats rhs_scale, float lhs_scale) {
  if (kScaling == kNormal) {
    // The product of two powers of two, by adding exponents: rhs_scale comes without its bias.
    int32_t bits;
    memcpy(&bits, &lhs_scale, sizeof bits);
    const Integers32 scale = MX_V(add_epi32)((Integers32)rhs_scale, MX_V(set1_epi32)(bits));
    return MX_V(fmadd_ps)(sum, (Floats)scale, total);
  }
  const Floats lhs = MX_V(set1_ps)(lhs_scale);
  if (kScaling == kProduct) return MX_V(fmadd_ps)(sum, rhs_scale * lhs, total);
#if MX_RANK >= MX_RANK_avx512
  const __m512 exponent = _mm512_add_ps(_mm512_getexp_ps(rhs_scale), _mm512_getexp_ps(lhs));
  return _mm512_add_ps(total, _mm512_scalef_ps(sum, exponent));
#else
  for (int j = 0; j < kWidth; ++j) {
    total[j] += (float)((double)sum[j] * (double)lhs_scale * (double)rhs_scale[j]);
  }
  return total;
#endif
}

// The first kRows rows of a tile, by so many columns at a time that sums do not wait for each other.
template <PanelType kType, int kBlocks, Scaling kScaling, int kRows, int kPairs>
void MultiplyOf(const PanelProduct& p) {
  constexpr int kWords = kChunk * (int)BytesPerElement(kType) / 4 / kBlocks;
  constexpr int kVectors = kRows <= 2 ? C / kWidth : 2;
  for (int column = 0; column < C; column += kVectors * kWidth) {
    const char* MX_RESTRICT lhs = p.lhs;
    const char* MX_RESTRICT rhs = p.rhs;
    float* MX_RESTRICT tile = p.tile + column;
    Floats total[kRows][kVectors];
    MX_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MX_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        total[i][j] = p.clear ? Floats{} : MX_V(load_ps)(tile + i * C + j * kWidth);
      }
    }
    for (int64_t chunk = 0; chunk < p.num_chunks; ++chunk) {
      const float* lhs_scales = (const float*)lhs;
      const float* rhs_scales = (const float*)rhs + column;
      const int32_t* corrections = (const int32_t*)(lhs + kBlocks * R * 4);
      const int32_t* words = (const int32_t*)(lhs + kBlocks * R * (kType == kInt8 ? 8 : 4));
      const int32_t* columns = (const int32_t*)(rhs + kBlocks * C * 4) + column;
      MX_UNROLL
      for (int s = 0; s < kBlocks; ++s) {
        Integers32 sum[kRows][kVectors], pairs[kRows][kVectors];
        MX_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const int32_t correction = kType == kInt8 ? corrections[s * R + i] : 0;
          MX_UNROLL
          for (int j = 0; j < kVectors; ++j) {
            sum[i][j] = MX_V(set1_epi32)(
                kPairs ? (correction >> 7) * OffsetOf(p.rhs_element) : correction);
          }
        }
        MX_UNROLL
        for (int g = 0; g < kWords; ++g) {
          Integers32 values[kVectors];
          MX_UNROLL
          for (int j = 0; j < kVectors; ++j) values[j] = *(const Integers32*)(columns + j * kWidth);
          MX_UNROLL
          for (int i = 0; i < kRows; ++i) {
            const Integers32 word = MX_V(set1_epi32)(words[i]);
            MX_UNROLL
            for (int j = 0; j < kVectors; ++j) {
              AddWord<kType, kPairs>(g, &pairs[i][j], &sum[i][j], values[j], word);
            }
          }
          columns += C;
          words += R;
        }
        MX_UNROLL
        for (int j = 0; j < kVectors; ++j) {
          Floats scale = MX_V(load_ps)(rhs_scales + s * C + j * kWidth);
          if (kScaling == kNormal) {
            scale = (Floats)MX_V(sub_epi32)((Integers32)scale, MX_V(set1_epi32)(127 << 23));
          }
          MX_UNROLL
          for (int i = 0; i < kRows; ++i) {
            total[i][j] = AddScaled<kScaling>(total[i][j], AsFloat<kType>(sum[i][j]), scale,
                                              lhs_scales[s * R + i]);
          }
        }
      }
      lhs = (const char*)words;
      rhs = (const char*)(columns - column);
    }
    MX_UNROLL
    for (int i = 0; i < kRows; ++i) {
      MX_UNROLL
      for (int j = 0; j < kVectors; ++j) MX_V(store_ps)(tile + i * C + j * kWidth, total[i][j]);
    }
  }
}

template <PanelType kType, int kBlocks, int kRows, int kPairs>
MX_INLINE void MultiplyScaled(const PanelProduct& p) {
  if (p.scaling == kNormal) return MultiplyOf<kType, kBlocks, kNormal, kRows, kPairs>(p);
  if (p.scaling == kProduct) return MultiplyOf<kType, kBlocks, kProduct, kRows, kPairs>(p);
  MultiplyOf<kType, kBlocks, kWide, kRows, kPairs>(p);
}

template <PanelType kType, int kPairs>
MX_INLINE void MultiplyRows(const PanelProduct& p) {
  if (p.block == 16) return MultiplyScaled<kType, 2, R, kPairs < 4 ? kPairs : 4>(p);
  if (p.rows == 1) return MultiplyScaled<kType, 1, 1, kPairs>(p);
  if (p.rows == 2) return MultiplyScaled<kType, 1, 2, kPairs>(p);
  if (p.rows <= 4) return MultiplyScaled<kType, 1, 4, kPairs>(p);
  MultiplyScaled<kType, 1, R, kPairs>(p);
}

template <PanelType kType>
void Multiply(const PanelProduct& p) {
#if MX_RANK == MX_RANK_avx2
  if constexpr (kType == kInt8) {
    // LargestInteger of INT8 is 127, but a code may be -128.
    const int64_t most = p.lhs_element == kElementInt8 ? 128 : LargestInteger(p.lhs_element);
    const int64_t moved = OffsetOf(p.rhs_element) + LargestInteger(p.rhs_element);
    const int64_t fit = 32767 / (2 * most * moved);
    if (fit >= 8) return MultiplyRows<kType, 8>(p);
    if (fit >= 4) return MultiplyRows<kType, 4>(p);
    return fit >= 2 ? MultiplyRows<kType, 2>(p) : MultiplyRows<kType, 1>(p);
  }
#endif
  MultiplyRows<kType, 0>(p);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_VECTORS_INL_H_
