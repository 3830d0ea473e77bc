// The handler of random bits: what `jax.random.bits` gives for keys of partitionable threefry, and
// for those that `split` and `fold_in` make of them.
#include <cstdint>
#include <vector>

#include "casts/draw.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// `bits`: for each key of `[*batch, 2]` its own `[*batch, *places]`.
ffi::Error RandomBits(ffi::ThreadPool pool, ffi::AnyBuffer keys,
                      ffi::Result<ffi::Buffer<ffi::S32>> bits, int32_t width,
                      ffi::Span<const int64_t> derivations) {
  if (width < 1 || width > 32) {
    return InvalidArgument("mx_jax random_bits: needs a width of 1 to 32, got width=", width);
  }
  std::vector<uint32_t> words;
  MX_RETURN_IF_ERROR(DeriveKeys("random_bits", keys, bits->dimensions(), derivations, &words));
  if (bits->element_count() == 0) return ffi::Error::Success();
  const int64_t places = static_cast<int64_t>(bits->element_count() / (words.size() / 2));
  DrawBits(pool, words, width, places, bits->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxRandomBits, mx::RandomBits,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<int32_t>("width")
                                  .Attr<xla::ffi::Span<const int64_t>>("derivations"));
