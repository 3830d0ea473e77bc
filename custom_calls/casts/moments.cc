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

// `codes` and `added` `[*rows, n]` and `scales` `[*rows, n/32]` to new codes and scales; `factors` are
// what the moment and what is added are multiplied by; `words` are random.
ffi::Error StepMoment(ffi::ThreadPool pool, ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::U8> scales,
                      ffi::Buffer<ffi::F32> added, ffi::Buffer<ffi::F32> factors,
                      ffi::Buffer<ffi::U32> words, ffi::Result<ffi::Buffer<ffi::U8>> out_codes,
                      ffi::Result<ffi::Buffer<ffi::U8>> out_scales, bool is_root, bool is_square) {
  const auto shape = codes.dimensions(), by_block = scales.dimensions();
  const auto alike = [](auto left, auto right) {
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
  };
  const bool fits = shape.size() >= 1 && by_block.size() == shape.size() &&
                    std::equal(shape.begin(), shape.end() - 1, by_block.begin()) &&
                    shape.back() == by_block.back() * kMomentBlock &&
                    alike(added.dimensions(), shape) && alike(out_codes->dimensions(), shape) &&
                    alike(out_scales->dimensions(), by_block) && factors.element_count() == 2 &&
                    words.element_count() == 2;
  if (!fits) {
    return InvalidArgument(
        "mx_jax step_moment: needs codes and added [*rows, n], scales [*rows, n/32], factors [2] ",
        "and words [2], got codes.shape=", Shape(shape), ", scales.shape=", Shape(by_block),
        ", added.shape=", Shape(added.dimensions()), ", factors.shape=",
        Shape(factors.dimensions()), ", words.shape=", Shape(words.dimensions()));
  }
  MomentPlan plan;
  plan.codes = codes.typed_data();
  plan.scales = scales.typed_data();
  plan.added = added.typed_data();
  plan.keep = factors.typed_data()[0];
  plan.add = factors.typed_data()[1];
  plan.is_root = is_root;
  plan.is_square = is_square;
  std::copy_n(words.typed_data(), 2, plan.words);
  plan.out_codes = out_codes->typed_data();
  plan.out_scales = out_scales->typed_data();
  const int64_t blocks = static_cast<int64_t>(scales.element_count());
  const MomentKernels& kernels = ChosenMomentKernels();
  ParallelFor(pool, (blocks + kPart - 1) / kPart, [&](int64_t task) {
    kernels.step(plan, task * kPart, std::min(blocks, (task + 1) * kPart));
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
