// The handler of a step of an optimizer's moment that is kept in MXFP8: it is read, moved and written
// in one pass. mx_jax/reference/moments.py defines the results.
#include "casts/moments.h"

#include <algorithm>
#include <cstdint>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kPart = 1 << 10;  // blocks of a task

const MomentKernels& ChosenMomentKernels() {
  static const MomentKernels* const kKernels[kNumIsas] = MX_KERNELS(kMoments);
  return Pick(kKernels);
}

// `codes` and `added` `[*batch, *rows, n]` and `scales` `[*batch, *rows, n/32]` to new codes and scales,
// by `factors` `[*batch, 2]`, of the moment and of what is added, and `words` `[*batch, 2]`, random.
ffi::Error StepMoment(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::U8> scales,
                      ffi::Buffer<ffi::F32> added, ffi::Buffer<ffi::F32> factors,
                      ffi::Buffer<ffi::U32> words, ffi::Result<ffi::Buffer<ffi::U8>> out_codes,
                      ffi::Result<ffi::Buffer<ffi::U8>> out_scales, bool is_root, bool is_square) {
  const auto shape = codes.dimensions(), by_block = scales.dimensions();
  const auto drawn = words.dimensions();
  const auto alike = [](auto left, auto right) {
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
  };
  const bool fits = shape.size() >= 1 && by_block.size() == shape.size() &&
                    std::equal(shape.begin(), shape.end() - 1, by_block.begin()) &&
                    shape.back() == by_block.back() * kMomentBlock &&
                    alike(added.dimensions(), shape) && alike(out_codes->dimensions(), shape) &&
                    alike(out_scales->dimensions(), by_block) && drawn.size() >= 1 &&
                    drawn.size() <= shape.size() && drawn.back() == 2 &&
                    std::equal(drawn.begin(), drawn.end() - 1, shape.begin()) &&
                    alike(factors.dimensions(), drawn);
  if (!fits) {
    return InvalidArgument(
        "mx_jax step_moment: needs codes and added [*batch, *rows, n], scales [*batch, *rows, n/32], ",
        "factors and words [*batch, 2], got codes.shape=", Shape(shape), ", scales.shape=",
        Shape(by_block), ", added.shape=", Shape(added.dimensions()), ", factors.shape=",
        Shape(factors.dimensions()), ", words.shape=", Shape(drawn));
  }
  const int64_t batch = static_cast<int64_t>(words.element_count()) / 2;
  const int64_t all = static_cast<int64_t>(scales.element_count());
  if (all == 0) return ffi::Error::Success();
  const int64_t blocks = all / batch, parts = (blocks + kPart - 1) / kPart;
  const MomentKernels& kernels = ChosenMomentKernels();
  ParallelFor(pool, batch * parts, [&](int64_t task) {
    const int64_t index = task / parts, first = (task - index * parts) * kPart;
    const int64_t block = index * blocks, place = block * kMomentBlock;
    const MomentPlan plan = {
        codes.typed_data() + place,
        scales.typed_data() + block,
        added.typed_data() + place,
        factors.typed_data()[2 * index],
        factors.typed_data()[2 * index + 1],
        is_root,
        is_square,
        {words.typed_data()[2 * index], words.typed_data()[2 * index + 1]},
        out_codes->typed_data() + place,
        out_scales->typed_data() + block,
    };
    kernels.step(plan, first, std::min(blocks, first + kPart));
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxStepMoment, mx::StepMoment,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<bool>("is_root")
                                  .Attr<bool>("is_square"));
