// Both directions strip by strip with AVX-512: what a direction needs is made once for all strips,
// and codes may go past the caches along rows too.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_AVX512_INL_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_AVX512_INL_H_

#include "casts/rows_avx512-inl.h"
#include "casts/strips-inl.h"

namespace mx::MX_TARGET {
namespace {

// Asks for a row of the strip to the right, which comes next, into the second-level cache.
template <class T>
MX_INLINE void PrefetchStrip(const T* x, const Strip& strip) {
  const char* next = reinterpret_cast<const char*>(x + (strip.last - strip.first));
  const int64_t bytes = (strip.last - strip.first) * static_cast<int64_t>(sizeof(T));
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
}

// The rows of a strip, which is then in the cache.
template <class T>
void VectorStripRows(const QuantizePlan& rows, const QuantizePlan& columns, const Strip& strip,
                     const Encoder& encoder, CastKernel others) {
  const int64_t first = strip.first / rows.block, full = strip.last / rows.block;
  for (int64_t i = 0; i < strip.num_rows; ++i) {
    const int64_t row = strip.slice * columns.length + strip.row + i;
    const int64_t block = row * rows.blocks_per_row;
    const int64_t start = row * rows.length + strip.first;
    PrefetchStrip(static_cast<const T*>(rows.x) + start, strip);
    if (first < full) {
      const Segment part = {block + first, full - first, start, TensorScale(rows, row)};
      EncodeSegmentAnyWay<T>(rows, encoder, part);
    }
    if (full * rows.block < strip.last) others(rows, block + full, block + full + 1);
  }
}

template <class T>
void VectorStripsOf(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin,
                    int64_t end, CastKernel row_kernel, CastKernel column_kernel) {
  Encoder encoder = EncoderOf(rows);
  encoder.stream = Streams(rows);
  for (int64_t index = begin; index < end; ++index) {
    const Strip strip = StripOf(rows, columns, index);
    VectorStripRows<T>(rows, columns, strip, encoder, row_kernel);
    StripTiles(columns, strip, column_kernel);
  }
  if (encoder.stream) _mm_sfence();
}

// Of rows that suit vectors; `row_kernel` takes what is left of a row, `column_kernel` all columns.
MX_INLINE void VectorStrips(const QuantizePlan& rows, const QuantizePlan& columns, int64_t begin,
                            int64_t end, CastKernel row_kernel, CastKernel column_kernel) {
  ByType(rows.type, [&](auto x) {
    VectorStripsOf<decltype(x)>(rows, columns, begin, end, row_kernel, column_kernel);
  });
}

}  // namespace
}  // namespace mx::MX_TARGET

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_STRIPS_AVX512_INL_H_
