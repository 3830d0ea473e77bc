// Packed panels of codes (weights.h) to panels that many rows are multiplied with, with AVX-512.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_UNPACK_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_UNPACK_AVX512_INL_H_

#include <immintrin.h>

#include "products/codes_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

// A packed panel of codes to a panel of kType, whatever its codes and scales are: as PackRhs.
template <PanelType kType, Coding kCoding, int kBlocks>
void UnpackOf(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  constexpr int kCodes = CodesPerWord(kCoding);
  constexpr int kWords = kCodes * (int)BytesPerElement(kType) / 4;
  const CodeTable table = MakeCodeTable<kType, kCoding>(source.element);
  const float* scale_table = ScaleTable(source.scale_kind, source.element, kType);
  const bool powers = source.scale_kind == kScaleE8M0;
  const int64_t num_chunks = (source.k + kChunk - 1) / kChunk;
  ScaleBounds bounds = NoBounds();
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const uint8_t* scales = ScalesAt(source, first_row, chunk * kBlocks);
    const char* codes = (const char*)CodesAt(source, first_row, chunk);
    MX_UNROLL
    for (int s = 0; s < kBlocks; ++s) {
      const __m256i bytes = _mm256_load_si256((const __m256i*)scales);
      bounds.low = _mm256_min_epu8(bounds.low, bytes);
      bounds.high = _mm256_max_epu8(bounds.high, bytes);
      MX_UNROLL
      for (int j = 0; j < 2; ++j) {
        const __m512i index = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)scales + j));
        _mm512_store_ps(out + 64 * j, powers ? PowersOfTwo(index, scale_table)
                                             : _mm512_i32gather_ps(index, scale_table, 4));
      }
      scales += C, out += C * 4;
    }
    PrefetchCodes(codes, BytesOfWords(kCoding, kChunk / kCodes));
    MX_UNROLL
    for (int line = 0; line < 2 * kChunk / kCodes; ++line) {
      __m512i words[kWords];
      const __m512i word = LoadWord<kCoding>(codes + 64 * (line % 2), line / 2);
      DecodeWords<kType, kCoding, false, true>(table, word, words);
      MX_UNROLL
      for (int w = 0; w < kWords; ++w) {
        _mm512_store_si512(out + ((line / 2 * kWords + w) * 2 + line % 2) * 64, words[w]);
      }
    }
    out += kChunk * BytesPerElement(kType) * C;
  }
  if (powers) AddTo(bounds, range);
}

template <PanelType kType, Coding kCoding>
MX_INLINE void UnpackAs(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  source.block == kChunk ? UnpackOf<kType, kCoding, 1>(source, first_row, out, range)
                         : UnpackOf<kType, kCoding, 2>(source, first_row, out, range);
}

// Panels of one type as PackRhs makes them; packed ones of formats that kInt8 holds, without a detour.
template <PanelType kType>
void UnpackRhs(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  if (source.layout == kStrided) return PackRhs<kType>(source, first_row, out, range);
  ByElement(source.element, [&](auto element) {
    constexpr Element kElement = decltype(element)::value;
    if constexpr (FitsInt8(kElement)) {
      UnpackAs<kType, CodingOf(kElement)>(source, first_row, out, range);
    } else {
      PackRhs<kType>(source, first_row, out, range);
    }
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_UNPACK_AVX512_INL_H_
