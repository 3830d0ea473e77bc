// Blocks along another axis than the last with AVX-512: a column is a lane, and a tile is
// kColumnTile of them. Squares are columns some of which share a scale.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_COLUMNS_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_COLUMNS_AVX512_INL_H_

#include "casts/quantize_squares-inl.h"
#include "casts/vectors_avx512-inl.h"

namespace mx::MX_TARGET {
namespace {

constexpr int kParts = kColumnTile / kLanes;

MX_INLINE __m512 LoadSome(const float* x, __mmask16 valid) {
  return _mm512_maskz_loadu_ps(valid, x);
}
MX_INLINE __m512 LoadSome(const Bf16* x, __mmask16 valid) {
  const __m256i half = _mm256_maskz_loadu_epi16(valid, x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
MX_INLINE __m512 LoadSome(const F16* x, __mmask16 valid) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(valid, x));
}

// Some columns of a block: at most kColumnTile.
template <class T>
struct Tile {
  const T* x;
  int64_t rows;
  int64_t stride;
  __mmask16 valid[kParts];
  __mmask64 all;
  bool stream;
};

template <class T>
MX_INLINE void StoreColumns(const Tile<T>& tile, uint8_t* out, __m512i codes) {
  if (tile.stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out), codes);
  } else {
    _mm512_mask_storeu_epi8(out, tile.all, codes);
  }
}

// Asks for a row of the tile to the right, which comes next: rows lie too far apart for the hardware
// to guess. Rows a power of two apart share few places of the first-level cache, so not there.
template <class T>
MX_INLINE void PrefetchNext(const T* x) {
  const char* next = reinterpret_cast<const char*>(x + kColumnTile);
  for (size_t at = 0; at < kColumnTile * sizeof(T); at += 64) {
    _mm_prefetch(next + at, _MM_HINT_T1);
  }
}

template <class T>
MX_INLINE void ColumnAmax(const Tile<T>& tile, __m512i (&amax)[kParts]) {
  const __m512i abs = Set(kAbs);
  for (int v = 0; v < kParts; ++v) amax[v] = Set(0);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const T* x = tile.x + i * tile.stride;
    PrefetchNext(x);
    for (int v = 0; v < kParts; ++v) {
      const __m512i bits = _mm512_castps_si512(LoadSome(x + v * kLanes, tile.valid[v]));
      amax[v] = _mm512_max_epi32(amax[v], _mm512_and_si512(bits, abs));
    }
  }
}
MX_INLINE void ColumnAmax(const Tile<Bf16>& tile, __m512i (&amax)[kParts]) {
  const __m512i abs = Set(0x7fff7fff);
  const __mmask32 low = static_cast<__mmask32>(tile.all);
  const __mmask32 high = static_cast<__mmask32>(tile.all >> 32);
  __m512i first = Set(0), second = Set(0);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const Bf16* x = tile.x + i * tile.stride;
    PrefetchNext(x);
    const __m512i a = _mm512_maskz_loadu_epi16(low, x);
    const __m512i b = _mm512_maskz_loadu_epi16(high, x + 32);
    first = _mm512_max_epi16(first, _mm512_and_si512(a, abs));
    second = _mm512_max_epi16(second, _mm512_and_si512(b, abs));
  }
  const __m512i both[2] = {first, second};
  for (int v = 0; v < kParts; ++v) {
    const __m256i words = v % 2 == 0 ? _mm512_castsi512_si256(both[v / 2])
                                     : _mm512_extracti64x4_epi64(both[v / 2], 1);
    amax[v] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
  }
}

// Codes of a tile of bfloat16 by 16-bit integers; see NearestWords.
template <Way kWay, class T>
MX_INLINE bool EncodeColumnWords(const Tile<T>&, const GroupScales*, const Encoder&, uint8_t*) {
  return false;
}
template <Way kWay>
MX_INLINE bool EncodeColumnWords(const Tile<Bf16>& tile, const GroupScales* scales,
                                 const Encoder& encoder, uint8_t* codes) {
  if (kWay != Way::kFloat) return false;
  for (int v = 0; v < kParts; ++v) {
    if (scales[v].tiny != 0) return false;
  }
  __m512i octave[2], smallest[2];
  for (int v = 0; v < 2; ++v) {
    const __m512i a = _mm512_load_si512(scales[2 * v].octave);
    const __m512i b = _mm512_load_si512(scales[2 * v + 1].octave);
    const __m512i c = _mm512_load_si512(scales[2 * v].smallest);
    const __m512i d = _mm512_load_si512(scales[2 * v + 1].smallest);
    octave[v] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)),
                                   _mm512_cvtepi32_epi16(b), 1);
    smallest[v] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(c)),
                                     _mm512_cvtepi32_epi16(d), 1);
  }
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const __mmask32 low = static_cast<__mmask32>(tile.all);
  const __mmask32 high = static_cast<__mmask32>(tile.all >> 32);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const Bf16* x = tile.x + i * tile.stride;
    const __m512i a = _mm512_maskz_loadu_epi16(low, x);
    const __m512i b = _mm512_maskz_loadu_epi16(high, x + 32);
    const __m512i bytes = WordsToBytes(NearestWords(a, octave[0], smallest[0], encoder),
                                       NearestWords(b, octave[1], smallest[1], encoder), a, b,
                                       encoder);
    StoreColumns(tile, codes + i * tile.stride, _mm512_permutexvar_epi64(order, bytes));
  }
  return true;
}

template <Way kWay, class T>
MX_INLINE void EncodeColumnTile(const Tile<T>& tile, const GroupScales* scales,
                                const Encoder& encoder, const ElementFormat& element,
                                const int32_t* random, uint8_t* codes) {
  if (EncodeColumnWords<kWay>(tile, scales, encoder, codes)) return;
  __m512 factor[kParts];
  for (int v = 0; v < kParts; ++v) factor[v] = _mm512_load_ps(scales[v].factor);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t at = i * tile.stride;
    __m512i each[kParts];
    for (int v = 0; v < kParts; ++v) {
      const __m512 x = LoadSome(tile.x + at + v * kLanes, tile.valid[v]);
      const __m512 y =
          kWay == Way::kFloatDivided ? _mm512_div_ps(x, factor[v]) : _mm512_mul_ps(x, factor[v]);
      each[v] = Codes<kWay>(y, encoder, element, random + at + v * kLanes, tile.valid[v]);
    }
    StoreColumns(tile, codes + at, Narrow<kWay>(each[0], each[1], each[2], each[3], encoder));
  }
}

// The largest magnitudes of columns that share a scale, `width` side by side, in each of their lanes.
MX_INLINE void ShareAmax(int64_t width, __m512i (&amax)[kParts]) {
  const int64_t parts = width / kLanes;
  for (int64_t first = 0; first < kParts; first += parts) {
    __m512i all = amax[first];
    for (int64_t v = first + 1; v < first + parts; ++v) all = _mm512_max_epi32(all, amax[v]);
    const __m512i largest = Set(_mm512_reduce_max_epi32(all));
    for (int64_t v = first; v < first + parts; ++v) amax[v] = largest;
  }
}

// A tile, whose rows lie `stride` apart: a scale for each column, or for each square of `width`
// columns if that is not 1. False where a block needs care.
template <class T, Way kWay>
MX_INLINE bool EncodeTile(const QuantizePlan& plan, const Encoder& encoder,
                          const ColumnPlace& place, int64_t stride, int64_t width) {
  Tile<T> tile;
  tile.x = static_cast<const T*>(plan.x) + place.start;
  tile.rows = place.rows;
  tile.stride = stride;
  tile.all = place.columns == 64 ? ~0ull : (1ull << place.columns) - 1;
  tile.stream = place.columns == kColumnTile && Streams(plan);
  for (int v = 0; v < kParts; ++v) tile.valid[v] = static_cast<__mmask16>(tile.all >> (v * kLanes));

  __m512i amax[kParts];
  ColumnAmax(tile, amax);
  if (width != 1) ShareAmax(width, amax);
  GroupScales scales[kParts];
  bool usual = true;
  for (int v = 0; v < kParts; ++v) {
    FindScales(amax[v], kGroup, plan.rule, TensorScale(plan, place.slice), &scales[v]);
    if (kWay == Way::kFloat) FindWordScales(amax[v], encoder, &scales[v]);
    usual = usual && (scales[v].nan & tile.valid[v]) == 0;
    if (kWay == Way::kFloatWide || kWay == Way::kFloatDivided || kWay == Way::kFloatRounded) {
      usual = usual && AreFinite(scales[v], kGroup);
    }
  }
  if (MX_UNLIKELY(!usual)) return false;
  const int64_t step = width == 1 ? kLanes : width;
  for (int64_t column = 0; column < place.columns; column += step) {
    const int64_t left = place.columns - column, count = left < kGroup ? left : kGroup;
    StoreScales(plan, scales[column / kLanes], place.scale + column / width,
                width == 1 ? count : 1);
  }
  const bool rounded = kWay == Way::kFloatRounded || kWay == Way::kIntegerRounded;
  const int32_t* random =
      rounded && plan.random_bits != nullptr ? plan.random_bits + place.start : nullptr;
  EncodeColumnTile<kWay>(tile, scales, encoder, plan.element, random, plan.codes + place.start);
  return true;
}

template <class T, Way kWay>
void Avx512ColumnBlocks(const QuantizePlan& plan, int64_t begin, int64_t end) {
  alignas(64) float scratch[kTileRows * kColumnTile];
  const Encoder encoder = EncoderOf(plan);
  const Magic magic = MagicOf(plan.element);
  for (int64_t index = begin; index < end; ++index) {
    if (EncodeTile<T, kWay>(plan, encoder, PlaceOf(plan, index), plan.inner, 1)) continue;
    ColumnBlock<T>(plan, magic, index, scratch);
  }
  if (Streams(plan)) _mm_sfence();
}

// As many squares side by side as a tile has columns for.
template <class T, Way kWay>
void Avx512SquareBlocks(const QuantizePlan& plan, int64_t begin, int64_t end) {
  const Encoder encoder = EncoderOf(plan);
  while (begin < end) {
    const Square square = SquareOf(plan, begin);
    const int64_t block = begin % plan.blocks_per_row, column = block * plan.block;
    int64_t count = kColumnTile / plan.block;
    count = count < end - begin ? count : end - begin;
    count = count < plan.blocks_per_row - block ? count : plan.blocks_per_row - block;
    const int64_t left = plan.length - column, columns = count * plan.block;
    const ColumnPlace place = {square.slice, square.start, begin, square.rows,
                               columns < left ? columns : left};
    if (!EncodeTile<T, kWay>(plan, encoder, place, plan.length, plan.block)) {
      QuantizeSquares<T>(plan, begin, begin + count);
    }
    begin += count;
  }
  if (Streams(plan)) _mm_sfence();
}

void Avx512Columns(const QuantizePlan& plan, int64_t begin, int64_t end) {
  if (!SuitsVectors(plan)) return Columns(plan, begin, end);
  ByType(plan.type, [&](auto x) {
    ByWay(plan, [&](auto way) {
      Avx512ColumnBlocks<decltype(x), way.value>(plan, begin, end);
    });
  });
}

void Avx512Squares(const QuantizePlan& plan, int64_t begin, int64_t end) {
  const bool fits = plan.block == 16 || plan.block == 32 || plan.block == 64;
  if (!fits || !SuitsVectors(plan)) return Squares(plan, begin, end);
  ByType(plan.type, [&](auto x) {
    ByWay(plan, [&](auto way) {
      Avx512SquareBlocks<decltype(x), way.value>(plan, begin, end);
    });
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_COLUMNS_AVX512_INL_H_
