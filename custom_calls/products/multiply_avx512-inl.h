// A panel by a panel, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_AVX512_INL_H_

#include <immintrin.h>
#include <string.h>

#include "products/pack_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

template <PanelType kType>
MX_INLINE __m512i MultiplyAdd(__m512i sum, __m512i rhs, __m512i word) {
#if MX_RANK >= MX_RANK_avx512_vnni
  if (kType == kInt8) return _mm512_dpbusd_epi32(sum, rhs, word);
  if (kType == kInt16) return _mm512_dpwssd_epi32(sum, rhs, word);
#endif
#if MX_RANK >= MX_RANK_avx512_bf16
  if (kType == kBf16) {
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)rhs, (__m512bh)word));
  }
#endif
  return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(rhs), _mm512_castsi512_ps(word),
                                             _mm512_castsi512_ps(sum)));
}

template <PanelType kType>
MX_INLINE __m512 AsFloat(__m512i sum) {
  if (kType == kInt8 || kType == kInt16) return _mm512_cvtepi32_ps(sum);
  return _mm512_castsi512_ps(sum);
}

template <Scaling kScaling>
MX_INLINE __m512 AddScaled(__m512 total, __m512 sum, __m512 rhs_scale, float lhs_scale) {
  if (kScaling == kNormal) {
    // The product of two powers of two, by adding exponents: rhs_scale comes without its bias.
    int32_t bits;
    memcpy(&bits, &lhs_scale, sizeof bits);
    const __m512i scale = _mm512_add_epi32(_mm512_castps_si512(rhs_scale), _mm512_set1_epi32(bits));
    return _mm512_fmadd_ps(sum, _mm512_castsi512_ps(scale), total);
  }
  const __m512 lhs = _mm512_set1_ps(lhs_scale);
  if (kScaling == kProduct) return _mm512_fmadd_ps(sum, _mm512_mul_ps(rhs_scale, lhs), total);
  const __m512 exponent = _mm512_add_ps(_mm512_getexp_ps(rhs_scale), _mm512_getexp_ps(lhs));
  return _mm512_add_ps(total, _mm512_scalef_ps(sum, exponent));
}

// The first kRows rows of a tile.
template <PanelType kType, int kBlocks, Scaling kScaling, int kRows>
void MultiplyOf(int64_t num_chunks, const char* MX_RESTRICT lhs, const char* MX_RESTRICT rhs,
                float* MX_RESTRICT tile, bool clear) {
  constexpr int kWords = kChunk * (int)BytesPerElement(kType) / 4 / kBlocks;
  __m512 total[kRows][2];
  MX_UNROLL
  for (int i = 0; i < kRows; ++i) {
    total[i][0] = clear ? _mm512_setzero_ps() : _mm512_load_ps(tile + i * C);
    total[i][1] = clear ? _mm512_setzero_ps() : _mm512_load_ps(tile + i * C + 16);
  }
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const float* lhs_scales = (const float*)lhs;
    const float* rhs_scales = (const float*)rhs;
    const int32_t* corrections = (const int32_t*)(lhs + kBlocks * R * 4);
    const int32_t* words = (const int32_t*)(lhs + kBlocks * R * (kType == kInt8 ? 8 : 4));
    const char* columns = rhs + kBlocks * C * 4;
    MX_UNROLL
    for (int s = 0; s < kBlocks; ++s) {
      __m512i sum[kRows][2];
      MX_UNROLL
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] = sum[i][1] =
            kType == kInt8 ? _mm512_set1_epi32(corrections[s * R + i]) : _mm512_setzero_si512();
      }
      MX_UNROLL
      for (int g = 0; g < kWords; ++g) {
        const __m512i first = _mm512_load_si512(columns), second = _mm512_load_si512(columns + 64);
        MX_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const __m512i word = _mm512_set1_epi32(words[i]);
          sum[i][0] = MultiplyAdd<kType>(sum[i][0], first, word);
          sum[i][1] = MultiplyAdd<kType>(sum[i][1], second, word);
        }
        columns += 128;
        words += R;
      }
      __m512 scale[2] = {_mm512_load_ps(rhs_scales + s * C),
                         _mm512_load_ps(rhs_scales + s * C + 16)};
      if (kScaling == kNormal) {
        const __m512i bias = _mm512_set1_epi32(127 << 23);
        scale[0] = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(scale[0]), bias));
        scale[1] = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_castps_si512(scale[1]), bias));
      }
      MX_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float factor = lhs_scales[s * R + i];
        total[i][0] = AddScaled<kScaling>(total[i][0], AsFloat<kType>(sum[i][0]), scale[0], factor);
        total[i][1] = AddScaled<kScaling>(total[i][1], AsFloat<kType>(sum[i][1]), scale[1], factor);
      }
    }
    lhs = (const char*)words;
    rhs = columns;
  }
  MX_UNROLL
  for (int i = 0; i < kRows; ++i) {
    _mm512_store_ps(tile + i * C, total[i][0]);
    _mm512_store_ps(tile + i * C + 16, total[i][1]);
  }
}

template <PanelType kType, int kBlocks, int kRows>
MX_INLINE void MultiplyScaled(Scaling scaling, int64_t num_chunks, const char* lhs, const char* rhs,
                              float* tile, bool clear) {
  if (scaling == kNormal) {
    MultiplyOf<kType, kBlocks, kNormal, kRows>(num_chunks, lhs, rhs, tile, clear);
  } else if (scaling == kProduct) {
    MultiplyOf<kType, kBlocks, kProduct, kRows>(num_chunks, lhs, rhs, tile, clear);
  } else {
    MultiplyOf<kType, kBlocks, kWide, kRows>(num_chunks, lhs, rhs, tile, clear);
  }
}

template <PanelType kType>
void Multiply(int rows, int32_t block, Scaling scaling, int64_t num_chunks,
                              const char* lhs, const char* rhs, float* tile, bool clear) {
  if (block == 16) {
    MultiplyScaled<kType, 2, R>(scaling, num_chunks, lhs, rhs, tile, clear);
  } else if (rows == 1) {
    MultiplyScaled<kType, 1, 1>(scaling, num_chunks, lhs, rhs, tile, clear);
  } else if (rows == 2) {
    MultiplyScaled<kType, 1, 2>(scaling, num_chunks, lhs, rhs, tile, clear);
  } else if (rows <= 4) {
    MultiplyScaled<kType, 1, 4>(scaling, num_chunks, lhs, rhs, tile, clear);
  } else {
    MultiplyScaled<kType, 1, R>(scaling, num_chunks, lhs, rhs, tile, clear);
  }
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_MULTIPLY_AVX512_INL_H_
