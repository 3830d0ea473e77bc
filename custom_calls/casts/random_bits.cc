// The handler of random bits: what `jax.random.bits` gives for keys of partitionable threefry, and
// for those that `split` and `fold_in` make of them.
#include "casts/random_bits.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>

#include "casts/threefry.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kPart = 1 << 14;  // places of a task; 2^32 is a multiple of it

const RandomBitsKernels& ChosenRandomBitsKernels() {
  static const RandomBitsKernels* const kKernels[kNumIsas] = MX_KERNELS(kRandomBits);
  return Pick(kKernels);
}

// `bits`: for each key of `[*batch, 2]` its own `[*batch, *places]`. First the key becomes the one that
// `split` has at an index, or `fold_in` makes of it: the same function, once for each of `derivations`.
ffi::Error RandomBits(ffi::ThreadPool pool, ffi::Buffer<ffi::U32> keys,
                      ffi::Result<ffi::Buffer<ffi::S32>> bits, int32_t width,
                      ffi::Span<const int64_t> derivations) {
  const auto given = keys.dimensions(), wanted = bits->dimensions();
  const bool fits = given.size() >= 1 && given.size() <= wanted.size() && given.back() == 2 &&
                    std::equal(given.begin(), given.end() - 1, wanted.begin());
  if (!fits) {
    return InvalidArgument("mx_jax random_bits: needs keys [*batch, 2] and bits [*batch, *places], ",
                           "got keys.shape=", Shape(given), ", bits.shape=", Shape(wanted));
  }
  if (width < 1 || width > 32) {
    return InvalidArgument("mx_jax random_bits: needs a width of 1 to 32, got width=", width);
  }
  const int64_t places =
      std::accumulate(wanted.begin() + (given.size() - 1), wanted.end(), int64_t{1},
                      std::multiplies<int64_t>());
  const int64_t parts = (places + kPart - 1) / kPart;
  const int64_t num_keys = static_cast<int64_t>(keys.element_count()) / 2;
  const uint32_t* from = keys.typed_data();
  int32_t* to = bits->typed_data();
  const RandomBitsKernels& kernels = ChosenRandomBitsKernels();
  ParallelFor(pool, num_keys * parts, [&](int64_t task) {
    const int64_t key = task / parts, first = (task - key * parts) * kPart;
    uint32_t own[2] = {from[2 * key], from[2 * key + 1]};
    for (const int64_t index : derivations) {
      Threefry(own[0], own[1], 0, static_cast<uint32_t>(index), &own[0], &own[1]);
    }
    kernels.fill(own, static_cast<uint64_t>(first), std::min(kPart, places - first),
                 width, to + key * places + first);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxRandomBits, mx::RandomBits,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int32_t>("width")
                                  .Attr<xla::ffi::Span<const int64_t>>("derivations"));
