// The handler that takes, in each block, that of two casts which loses less: the twin of LeastLoss in
// mx_jax/reference/scale_rules.py.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <vector>

#include "casts/attributes.h"
#include "common/float_types.h"
#include "casts/geometry.h"
#include "common/checks.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kTaskElements = 1 << 14;
constexpr int64_t kColumns = 16;  // blocks along columns that are taken together

int64_t PowerOfTwoFrom(int64_t size) {
  int64_t power = 1;
  while (power < size) power *= 2;
  return power;
}

// A block, or some that lie side by side along columns: their elements as rows of columns.
struct Tile {
  int64_t start, rows, row_stride, columns, scale;
};

// All tiles of an array, and how large their sums are before they are halved: sums of one row each
// where blocks lie along columns, else of one element.
struct Tiles {
  explicit Tiles(const Geometry& geometry)
      : g(geometry),
        by_columns(g.block_rows == 0 && g.inner > 1),
        width(by_columns ? kColumns : PowerOfTwoFrom(std::min(g.block, g.length))),
        height(PowerOfTwoFrom(by_columns ? std::min(g.block, g.length)
                                         : std::min(g.block_rows, g.rows))) {
    const int64_t lines = g.block_rows != 0 ? CeilDivide(g.rows, g.block_rows) : 1;
    count = g.outer * lines * g.num_blocks * (by_columns ? CeilDivide(g.inner, kColumns) : 1);
  }

  Tile operator[](int64_t index) const {
    if (by_columns) {
      const int64_t across = CeilDivide(g.inner, kColumns), line = index / across;
      const int64_t column = index % across * kColumns, first = line % g.num_blocks * g.block;
      return {(line / g.num_blocks * g.length + first) * g.inner + column,
              std::min(g.block, g.length - first), g.inner, std::min(kColumns, g.inner - column),
              line * g.inner + column};
    }
    const int64_t line = index / g.num_blocks, column = index % g.num_blocks * g.block;
    const int64_t columns = std::min(g.block, g.length - column);
    if (g.block_rows == 0) return {line * g.length + column, 1, 0, columns, index};
    const int64_t high = CeilDivide(g.rows, g.block_rows), row = line % high * g.block_rows;
    return {(line / high * g.rows + row) * g.length + column, std::min(g.block_rows, g.rows - row),
            g.length, columns, index};
  }

  const Geometry& g;
  const bool by_columns;
  const int64_t width, height;
  int64_t count;
};

struct Choice {
  const void* x;
  const float* values[2];
  const uint8_t* codes[2];
  const uint8_t* scales[2];
  uint8_t *out_codes, *out_scales;
};

// Sums of squares by halves, in the order of mx_jax.codecs.float32.sum_in_order: rows, then columns.
template <class Type>
void AddLosses(const Tiles& tiles, const Tile& tile, const Type* x, const float* values,
               float* terms) {
  const int64_t size = tiles.height * tiles.width;
  if (tile.rows < tiles.height || tile.columns < tiles.width) std::fill_n(terms, size, 0.0f);
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t first = tile.start + row * tile.row_stride;
    for (int64_t column = 0; column < tile.columns; ++column) {
      const float lost = values[first + column] - Widen(x[first + column]), square = lost * lost;
      // XLA flushes what is subnormal.
      terms[row * tiles.width + column] = square < FLT_MIN ? 0.0f : square;
    }
  }
  const int64_t last = tiles.by_columns ? kColumns : 1;
  for (int64_t left = size / 2; left >= last; left /= 2) {
    for (int64_t i = 0; i < left; ++i) terms[i] += terms[i + left];
  }
}

template <class Type>
void ChooseBlocks(const Tiles& tiles, const Choice& choice, int64_t begin, int64_t end) {
  const Type* x = static_cast<const Type*>(choice.x);
  const size_t size = static_cast<size_t>(tiles.height * tiles.width);
  std::vector<float> memory(2 * size);
  float *lost = memory.data(), *other = lost + size;
  for (int64_t index = begin; index < end; ++index) {
    const Tile tile = tiles[index];
    AddLosses(tiles, tile, x, choice.values[0], lost);
    AddLosses(tiles, tile, x, choice.values[1], other);
    const int64_t blocks = tiles.by_columns ? tile.columns : 1;
    uint8_t winner[kColumns];
    for (int64_t i = 0; i < blocks; ++i) {
      winner[i] = other[i] < lost[i];
      choice.out_scales[tile.scale + i] = choice.scales[winner[i]][tile.scale + i];
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t first = tile.start + row * tile.row_stride;
      if (!tiles.by_columns) {
        std::copy_n(choice.codes[winner[0]] + first, tile.columns, choice.out_codes + first);
        continue;
      }
      for (int64_t i = 0; i < blocks; ++i) {
        const uint8_t one = choice.codes[0][first + i], two = choice.codes[1][first + i];
        choice.out_codes[first + i] = winner[i] ? two : one;
      }
    }
  }
}

// `[*batch, *shape]`: x, the values that two casts of it to nearest have, and codes of both; and their
// scales.
ffi::Error LeastLoss(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> values,
                     ffi::Buffer<ffi::F32> other_values, ffi::Buffer<ffi::U8> codes,
                     ffi::Buffer<ffi::U8> other_codes, ffi::Buffer<ffi::U8> scales,
                     ffi::Buffer<ffi::U8> other_scales, ffi::Result<ffi::Buffer<ffi::U8>> out_codes,
                     ffi::Result<ffi::Buffer<ffi::U8>> out_scales,
                     ffi::Span<const int64_t> blocks) {
  const Dimensions shape(x.dimensions().begin(), x.dimensions().end());
  FloatType type{};
  Geometry g;
  MX_RETURN_IF_ERROR(ParseFloatType(x, &type, "least_loss:"));
  MX_RETURN_IF_ERROR(FindGeometry("least_loss", shape, blocks, &g));
  const Dimensions scales_shape = ScalesShape(shape, g);
  const auto have = [](const Dimensions& wanted, const auto&... each) {
    return (SameShape(each.dimensions(), wanted) && ...);
  };
  if (!have(shape, values, other_values, codes, other_codes, *out_codes) ||
      !have(scales_shape, scales, other_scales, *out_scales)) {
    return InvalidArgument("mx_jax least_loss: values and codes must be of shape ", Shape(shape),
                           ", scales of shape ", Shape(scales_shape), ", got values.shape=",
                           Shape(values.dimensions()), ", codes.shape=", Shape(codes.dimensions()),
                           ", scales.shape=", Shape(scales.dimensions()));
  }
  const Choice choice{x.untyped_data(),
                      {values.typed_data(), other_values.typed_data()},
                      {codes.typed_data(), other_codes.typed_data()},
                      {scales.typed_data(), other_scales.typed_data()},
                      out_codes->typed_data(),
                      out_scales->typed_data()};
  const int64_t size = static_cast<int64_t>(x.element_count());
  if (size == 0) return ffi::Error::Success();
  const Tiles tiles(g);
  const int64_t step = std::max<int64_t>(1, kTaskElements * tiles.count / size);
  ParallelFor(pool, CeilDivide(tiles.count, step), [&](int64_t task) {
    const int64_t begin = task * step, end = std::min(begin + step, tiles.count);
    ByType(type, [&](auto of) { ChooseBlocks<decltype(of)>(tiles, choice, begin, end); });
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxLeastLoss, mx::LeastLoss,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<xla::ffi::Span<const int64_t>>("blocks"));
