// The handler of a step of an optimizer's moments that are kept in MXFP8: each is read, moved and
// written in one pass. mx_jax/reference/moments.py defines the results.
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

constexpr int64_t kPart = 1 << 9;  // blocks of a task
constexpr int64_t kMaxMoments = 4;  // of one call

const MomentKernels& ChosenMomentKernels() {
  static const MomentKernels* const kKernels[kNumIsas] = MX_KERNELS(kMoments);
  return Pick(kKernels);
}

// For each moment `codes` `[*batch, *rows, n]` and `scales` `[*batch, *rows, n/32]` to new ones, by what
// is added to all of them, `[*batch, *rows, n]`, by `factors` `[*batch, 2 * moments]`, of the moment and
// of what is added, and by `words` alike, which are random. What is added is in a cache for all but the
// first.
ffi::Error StepMoments(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> added,
                       ffi::Buffer<ffi::F32> factors, ffi::Buffer<ffi::U32> words,
                       ffi::RemainingArgs given, ffi::RemainingRets wanted,
                       ffi::Span<const int32_t> is_root, ffi::Span<const int32_t> is_square) {
  const auto shape = added.dimensions(), drawn = words.dimensions();
  const auto alike = [](auto left, auto right) {
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
  };
  const int64_t moments = static_cast<int64_t>(is_root.size());
  bool fits = shape.size() >= 1 && shape.back() % kMomentBlock == 0 && moments >= 1 &&
              moments <= kMaxMoments && is_square.size() == is_root.size() &&
              given.size() == 2 * is_root.size() && wanted.size() == given.size() &&
              drawn.size() >= 1 && drawn.size() <= shape.size() && drawn.back() == 2 * moments &&
              std::equal(drawn.begin(), drawn.end() - 1, shape.begin()) &&
              alike(factors.dimensions(), drawn);
  MomentPlan whole[kMaxMoments];
  for (int64_t i = 0; fits && i < 2 * moments; ++i) {
    auto from = given.get<ffi::Buffer<ffi::U8>>(i);
    auto to = wanted.get<ffi::Buffer<ffi::U8>>(i);
    fits = from.has_value() && to.has_value() && alike(from->dimensions(), (*to)->dimensions());
    if (!fits) break;
    const auto own = from->dimensions();
    const bool scales = i % 2 == 1;
    fits = own.size() == shape.size() && std::equal(own.begin(), own.end() - 1, shape.begin()) &&
           own.back() * (scales ? kMomentBlock : 1) == shape.back();
    MomentPlan& plan = whole[i / 2];
    (scales ? plan.scales : plan.codes) = from->typed_data();
    (scales ? plan.out_scales : plan.out_codes) = (*to)->typed_data();
  }
  if (!fits) {
    return InvalidArgument(
        "mx_jax step_moments: needs added [*batch, *rows, n], factors and words [*batch, 2 * moments], ",
        "and codes [*batch, *rows, n] and scales [*batch, *rows, n/32] of 1 to ", kMaxMoments,
        " moments, got added.shape=", Shape(shape), ", factors.shape=", Shape(factors.dimensions()),
        ", words.shape=", Shape(drawn), ", moments=", moments);
  }
  const int64_t batch = static_cast<int64_t>(words.element_count()) / (2 * moments);
  const int64_t all = static_cast<int64_t>(added.element_count()) / kMomentBlock;
  if (all == 0) return ffi::Error::Success();
  const int64_t blocks = all / batch, parts = (blocks + kPart - 1) / kPart;
  const MomentKernels& kernels = ChosenMomentKernels();
  ParallelFor(pool, batch * parts, [&](int64_t task) {
    const int64_t index = task / parts, first = (task - index * parts) * kPart;
    const int64_t block = index * blocks, place = block * kMomentBlock;
    for (int64_t i = 0; i < moments; ++i) {
      const int64_t pair = 2 * (index * moments + i);
      MomentPlan plan = whole[i];
      plan.codes += place;
      plan.out_codes += place;
      plan.scales += block;
      plan.out_scales += block;
      plan.added = added.typed_data() + place;
      plan.keep = factors.typed_data()[pair];
      plan.add = factors.typed_data()[pair + 1];
      std::copy_n(words.typed_data() + pair, 2, plan.words);
      plan.is_root = is_root[i] != 0;
      plan.is_square = is_square[i] != 0;
      kernels.step(plan, first, std::min(blocks, first + kPart));
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxStepMoments, mx::StepMoments,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int32_t>>("is_root")
                                  .Attr<xla::ffi::Span<const int32_t>>("is_square"));
