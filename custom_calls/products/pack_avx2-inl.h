// Operands to panels, with AVX2: eight rows at a time.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX2_INL_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX2_INL_H_

#include "products/decode_avx2-inl.h"
#include "products/kernels_plain-inl.h"

namespace mx::MX_TARGET {
namespace {

MX_INLINE void Transpose8x8(__m256i* r) {
  __m256i t[8];
  MX_UNROLL
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  MX_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Columns i and 4 + i of rows 0 to 3, and of rows 4 to 7.
    const auto columns = [&t, i](int at) {
      const __m256i a = t[at + i / 2], b = t[at + 2 + i / 2];
      return i % 2 ? _mm256_unpackhi_epi64(a, b) : _mm256_unpacklo_epi64(a, b);
    };
    r[i] = _mm256_permute2x128_si256(columns(0), columns(4), 0x20);
    r[4 + i] = _mm256_permute2x128_si256(columns(0), columns(4), 0x31);
  }
}

// `count` elements from `at` on as they lie, of 8 bytes or 32; zeros beyond.
template <class Vector>
MX_INLINE Vector LoadPart(const Source& source, int64_t at, int64_t count) {
  Vector part{};
  const int64_t size = ElementBytes(source.element), bytes = count * size;
  const char* from = (const char*)source.elements + at * size;
  if (bytes >= (int64_t)sizeof part) memcpy(&part, from, sizeof part);
  else if (bytes > 0) memcpy(&part, from, (size_t)bytes);
  return part;
}

// 8 values of high precision.
MX_INLINE __m256i LoadValues(const Source& source, int64_t at, int64_t count) {
  if (source.element == kElementFloat32) return LoadPart<__m256i>(source, at, count);
  const __m128i words = LoadPart<__m128i>(source, at, count);
  if (source.element == kElementF16) return (__m256i)_mm256_cvtph_ps(words);
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
}

// Words of 4 codes, consecutive along k, of 8 rows.
MX_INLINE void ChunkCodes(const Source& source, int64_t row, int64_t k, int64_t rows, int64_t left,
                          __m256i* words) {
  const int64_t at = row * source.row_stride + k * source.k_stride;
  if (source.k_stride == 1) {
    for (int i = 0; i < 8; ++i) {
      words[i] = LoadPart<__m256i>(source, at + i * source.row_stride, i < rows ? left : 0);
    }
    return Transpose8x8(words);
  }
  for (int g = 0; g < 8; ++g) {
    __m128i bytes[4];
    for (int i = 0; i < 4; ++i) {
      const int k = 4 * g + i;
      bytes[i] = _mm_cvtsi64_si128(
          LoadPart<int64_t>(source, at + k * source.k_stride, k < left ? rows : 0));
    }
    const __m128i low = _mm_unpacklo_epi8(bytes[0], bytes[1]);
    const __m128i high = _mm_unpacklo_epi8(bytes[2], bytes[3]);
    words[g] = _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
  }
}

// The words of one chunk of 8 rows of high-precision values.
MX_INLINE void ChunkValues(const Source& source, int64_t row, int64_t k, int64_t rows, int64_t left,
                           __m256i* words) {
  const int64_t at = row * source.row_stride + k * source.k_stride;
  for (int i = 0; i < kChunk; ++i) {
    const int row = i % 8, k = i / 8 * 8;
    words[i] = source.k_stride != 1
                   ? LoadValues(source, at + i * source.k_stride, i < left ? rows : 0)
                   : LoadValues(source, at + row * source.row_stride + k, row < rows ? left - k : 0);
  }
  for (int i = 0; source.k_stride == 1 && i < kChunk; i += 8) Transpose8x8(words + i);
}

// The words of one chunk of 8 rows; k is its first position.
template <PanelType kType, Element kElement>
MX_INLINE void ChunkWords(const CodeTable<kElement>& table, const Source& source, int64_t row,
                          int64_t k, int64_t rows, __m256i* words) {
  constexpr int kEach = (int)BytesPerElement(kType);
  constexpr Layout kLayout = kElement <= kElementInt8 ? LayoutOf(kElement) : kStrided;
  if constexpr (kElement > kElementInt8) {
    ChunkValues(source, row, k, rows, source.k - k, words);
  } else {
    __m256i codes[8];
    if (source.layout == kStrided) {
      ChunkCodes(source, row, k, rows, source.k - k, codes);
    } else {
      const uint8_t* from = CodesAt(source, row, k / kChunk) + row % C * 4;
      for (int g = 0; g < 8; ++g) {
        codes[g] = kLayout != kPanels4 ? LoadWord<kLayout>(from, g)
                   : g % 2 ? _mm256_srli_epi16(LoadWord<kPanels4>(from, g / 2), 4)
                           : LoadWord<kPanels4>(from, g / 2);
      }
    }
    for (int g = 0; g < 8; ++g) ExpandAny<kType>(table, codes[g], words + kEach * g);
  }
}

// A panel of `width` rows, of which it writes a few words more: what follows overwrites them.
template <PanelType kType, Element kElement, bool kLhs>
void PackPanelOf(const Source& source, int64_t first_row, int width, char* out, ScaleRange* range) {
  constexpr int kWords = kChunk * (int)BytesPerElement(kType) / 4;
  const CodeTable<kElement> table;
  const int64_t left = source.rows - first_row;
  const int per_chunk = kChunk / source.block;
  const __m256i offset = _mm256_set1_epi8((char)(kType == kInt8 && !kLhs ? OffsetOf(kElement) : 0));
  for (int64_t k = 0; k < source.k; k += kChunk) {
    for (int s = 0; s < per_chunk; ++s, out += 4 * width) {
      PackScales<kType>(source, first_row, k / source.block + s, width, (float*)out, range);
    }
    int32_t* corrections = (int32_t*)out;
    if (kType == kInt8 && kLhs) out += 4 * per_chunk * width;
    for (int row = 0; row < width; row += 8) {
      __m256i words[kWords];
      ChunkWords<kType>(table, source, first_row + row, k, left - row, words);
      for (int s = 0; kType == kInt8 && kLhs && s < per_chunk; ++s) {
        __m256i sums = _mm256_setzero_si256();
        for (int g = s * kWords / per_chunk; g < (s + 1) * kWords / per_chunk; ++g) {
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), words[g]);
          sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(-128)));
        }
        _mm256_storeu_si256((__m256i*)(corrections + s * width), sums);
      }
      for (int g = 0; g < kWords; ++g) {
        _mm256_storeu_si256((__m256i*)(out + 4 * (g * width + row)),
                            _mm256_add_epi8(words[g], offset));
      }
    }
    out += 4 * kWords * width;
  }
}

template <PanelType kType, bool kLhs>
void PackPanel(const Source& source, int64_t first_row, int width, char* out, ScaleRange* range) {
  const auto pack = [&](auto element) {
    constexpr Element kElement = decltype(element)::value;
    if constexpr (Holds(kType, kElement)) {
      PackPanelOf<kType, kElement, kLhs>(source, first_row, width, out, range);
    }
  };
  if (source.element <= kElementInt8) ByElement(source.element, pack);
  else pack(ElementConstant<kElementFloat32>());
}

template <PanelType kType>
void PackLhs(const Source& source, int64_t first_row, char* out, int64_t stride,
             ScaleRange* range) {
  for (int panel = 0; panel < kLhsPanelsPerGroup; ++panel) {
    PackPanel<kType, true>(source, first_row + panel * R, R, out + panel * stride, range);
  }
}

template <PanelType kType>
void PackFew(const Source& source, int64_t first_row, int rows, char* out, ScaleRange* range) {
  PackPanel<kType, true>(source, first_row, rows, out, range);
}

template <PanelType kType>
void PackRhs(const Source& source, int64_t first_row, char* out, ScaleRange* range) {
  PackPanel<kType, false>(source, first_row, C, out, range);
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_PACK_AVX2_INL_H_
