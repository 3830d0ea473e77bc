// Random bits of a handler's keys, which others share: drawn where they are read.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_DRAW_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_DRAW_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "casts/threefry.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

// The keys of each place of an array's first axes: of the given ones `[*batch, 2]`, of which an axis of
// one stands for any length, those that `split` has at an index, or `fold_in` makes of them: the same
// function, once for each of `derivations`.
template <class Shape>
xla::ffi::Error DeriveKeys(const char* operation, const xla::ffi::AnyBuffer& keys,
                           const Shape& shape, xla::ffi::Span<const int64_t> derivations,
                           std::vector<uint32_t>* words) {
  const auto key_shape = keys.dimensions();
  const size_t batch = key_shape.size() - 1;
  bool fits = keys.element_type() == xla::ffi::U32 && key_shape.size() >= 1 &&
              batch <= shape.size() && key_shape.back() == 2;
  int64_t count = 1;
  for (size_t axis = 0; fits && axis < batch; ++axis) {
    fits = key_shape[axis] == 1 || key_shape[axis] == shape[axis];
    count *= shape[axis];
  }
  if (!fits) {
    return InvalidArgument("mx_jax ", operation, ": needs keys uint32 [*batch, 2] for an array ",
                           "[*batch, *places], got keys.shape=", mx::Shape(key_shape), ", shape=",
                           mx::Shape(shape));
  }
  const auto* from = static_cast<const uint32_t*>(keys.untyped_data());
  for (int64_t place = 0; place < count; ++place) {
    int64_t key = 0, stride = 1, rest = place;
    for (size_t axis = batch; axis-- > 0; rest /= shape[axis]) {
      if (key_shape[axis] == 1) continue;
      key += rest % shape[axis] * stride;
      stride *= key_shape[axis];
    }
    uint32_t first = from[2 * key], second = from[2 * key + 1];
    for (const int64_t index : derivations) {
      uint32_t high[1] = {0}, low[1] = {static_cast<uint32_t>(index)};
      Threefry(first, second, high, low);
      first = high[0], second = low[0];
    }
    words->push_back(first);
    words->push_back(second);
  }
  return xla::ffi::Error::Success();
}

// Of each key `width` random bits for so many places.
template <class Pool>
void DrawBits(Pool& pool, const std::vector<uint32_t>& keys, int32_t width, int64_t places,
              int32_t* bits) {
  constexpr int64_t kPart = 1 << 14;  // places of a task; 2^32 is a multiple of it
  static const RandomBitsKernels* const kKernels[kNumIsas] = MX_KERNELS(kRandomBits);
  const RandomBitsKernels& kernels = Pick(kKernels);
  const int64_t parts = (places + kPart - 1) / kPart;
  ParallelFor(pool, static_cast<int64_t>(keys.size() / 2) * parts, [&](int64_t task) {
    const int64_t key = task / parts, first = (task - key * parts) * kPart;
    kernels.fill(keys.data() + 2 * key, static_cast<uint64_t>(first),
                 std::min(kPart, places - first), width, bits + key * places + first);
  });
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_DRAW_H_
