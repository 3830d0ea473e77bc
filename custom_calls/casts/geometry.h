// Where blocks lie in an array: the twin of mx_jax/codecs/blocks.py.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_GEOMETRY_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_GEOMETRY_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/checks.h"

namespace mx {

using Dimensions = std::vector<int64_t>;

// A blocked axis, counted from the start, and the positions of a block along it.
struct BlockedAxis {
  int64_t axis;
  int64_t size;
};

// An array as `[outer, length, inner]` with blocks along `length`. Two-dimensional blocks, of the
// last two axes, make it `[outer, rows, length]` instead, with blocks of `block_rows` by `block`.
struct Geometry {
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;
  int64_t block = 1;
  int64_t num_blocks = 1;  // along `length`
  int64_t rows = 1;
  int64_t block_rows = 0;  // 0: one-dimensional
  std::vector<BlockedAxis> axes;  // ascending
};

// A block that is longer, of any axis, holds all of it: sums with a block's size stay in range.
constexpr int64_t kLongestBlock = int64_t{1} << 40;

inline int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Blocked axes count blocks, others keep their length.
inline Dimensions ScalesShape(Dimensions shape, const Geometry& geometry) {
  for (const BlockedAxis& blocked : geometry.axes) {
    shape[blocked.axis] = CeilDivide(shape[blocked.axis], blocked.size);
  }
  return shape;
}

// `blocks` is flat: axis from the end, size; a size of 0 is the whole axis. Several axes must be
// neighbours and whole: then they are one; or the last two.
template <class Shape>
xla::ffi::Error FindGeometry(const char* operation, const Shape& shape,
                             xla::ffi::Span<const int64_t> blocks, Geometry* geometry) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  if (blocks.size() == 0 || blocks.size() % 2 != 0) {
    return InvalidArgument("mx_jax ", operation, ": blocks must be pairs of axis and size, got ",
                           blocks.size(), " numbers");
  }
  bool whole = true;
  for (size_t i = 0; i < blocks.size(); i += 2) {
    if (blocks[i] >= 0 || blocks[i] < -rank || blocks[i + 1] < 0) {
      return InvalidArgument("mx_jax ", operation, ": blocks need axes in -", rank,
                             "..-1 and sizes >= 0, got axis=", blocks[i],
                             ", size=", blocks[i + 1]);
    }
    const int64_t axis = blocks[i] + rank, size = std::min(blocks[i + 1], kLongestBlock);
    if (i > 0 && axis != geometry->axes.back().axis + 1) {
      return InvalidArgument("mx_jax ", operation, ": blocked axes must be neighbours, ascending, ",
                             "got axis=", blocks[i], " after axis=", blocks[i - 2]);
    }
    whole = whole && size == 0;
    const int64_t extent = shape[axis] > 0 ? shape[axis] : 1;
    geometry->axes.push_back({axis, size == 0 ? extent : size});
  }
  if (geometry->axes.size() == 2 && !whole && geometry->axes.back().axis == rank - 1) {
    for (int64_t axis = 0; axis < rank - 2; ++axis) geometry->outer *= shape[axis];
    geometry->rows = shape[rank - 2];
    geometry->length = shape[rank - 1];
    geometry->block_rows = geometry->axes.front().size;
    geometry->block = geometry->axes.back().size;
    geometry->num_blocks = CeilDivide(geometry->length, geometry->block);
    return xla::ffi::Error::Success();
  }
  if (geometry->axes.size() > 1 && !whole) {
    return InvalidArgument("mx_jax ", operation, ": several blocked axes must be whole, or the ",
                           "last two, got ", geometry->axes.size(), " axes from axis=", blocks[0],
                           " on");
  }
  const int64_t first = geometry->axes.front().axis, last = geometry->axes.back().axis;
  for (int64_t axis = 0; axis < rank; ++axis) {
    (axis < first ? geometry->outer : axis > last ? geometry->inner : geometry->length) *=
        shape[axis];
  }
  geometry->block = whole ? (geometry->length > 0 ? geometry->length : 1)
                          : geometry->axes.front().size;
  geometry->num_blocks = CeilDivide(geometry->length, geometry->block);
  return xla::ffi::Error::Success();
}

// Where the blocks of a plan lie.
template <class Plan>
void FillPlan(const Geometry& geometry, Plan* plan) {
  plan->outer = geometry.outer;
  plan->length = geometry.length;
  plan->inner = geometry.inner;
  plan->block = geometry.block;
  plan->blocks_per_row = geometry.num_blocks;
  plan->rows = geometry.rows;
  plan->block_rows = geometry.block_rows;
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_GEOMETRY_H_
