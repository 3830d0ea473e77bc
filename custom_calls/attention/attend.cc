// The handler of attention: checks every shape and dtype, then runs the kernels, a matrix of keys
// at a time.
#include "attention/attend.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

#if MX_X86
const AttendKernels* const kKernels[kNumIsas] = {&portable::kAttend, &avx2::kAttend,
                                                 &avx512::kAttend};
#else
const AttendKernels* const kKernels[kNumIsas] = {&portable::kAttend};
#endif

using Floats = ffi::Buffer<ffi::F32>;
using Dimensions = ffi::Span<const int64_t>;

int64_t At(Dimensions shape, size_t from_end) { return shape[shape.size() - from_end]; }

// Keys `[*batch, matrices, length, width]`, values likewise with a width of their own, queries and
// the output with their number for length, and a position for each entry of the batch.
bool Fits(Dimensions queries, Dimensions keys, Dimensions values, Dimensions position,
          Dimensions out) {
  const size_t rank = keys.size();
  if (rank < 3 || queries.size() != rank || values.size() != rank || out.size() != rank ||
      position.size() != rank - 2 || position[rank - 3] != 1) {
    return false;
  }
  for (size_t axis = 0; axis + 2 < rank; ++axis) {
    const int64_t size = keys[axis];
    if (queries[axis] != size || values[axis] != size || out[axis] != size) return false;
    if (axis + 3 < rank && position[axis] != size) return false;
  }
  return At(queries, 1) == At(keys, 1) && At(values, 2) == At(keys, 2) &&
         At(out, 2) == At(queries, 2) && At(out, 1) == At(values, 1);
}

ffi::Error Attend(ffi::ThreadPool pool, Floats queries, Floats keys, Floats values,
                  ffi::Buffer<ffi::S32> position, ffi::Result<Floats> out, float scale) {
  const Dimensions shape = keys.dimensions();
  if (!Fits(queries.dimensions(), shape, values.dimensions(), position.dimensions(),
            out->dimensions())) {
    return InvalidArgument("mx_jax attend: needs queries [*batch, matrices, queries, width], keys ",
                           "[*batch, matrices, length, width], values likewise, and position ",
                           "[*batch, 1], got queries.shape=", Shape(queries.dimensions()),
                           ", keys.shape=", Shape(shape),
                           ", values.shape=", Shape(values.dimensions()),
                           ", position.shape=", Shape(position.dimensions()),
                           ", out.shape=", Shape(out->dimensions()));
  }
  const int64_t together = At(shape, 3);
  const int64_t matrices = static_cast<int64_t>(position.element_count()) * together;
  const int64_t length = At(shape, 2), width = At(shape, 1), value_width = At(out->dimensions(), 1);
  const int64_t num_queries = At(out->dimensions(), 2);
  const AttendKernels& kernels = Pick(kKernels);
  const auto run = [&](int64_t matrix) {
    AttendProblem p{};
    const int64_t last = position.typed_data()[matrix / together];
    p.num_queries = num_queries, p.width = width, p.value_width = value_width;
    p.seen = std::min(length, last + 1);
    p.scale = scale;
    p.queries = queries.typed_data() + matrix * num_queries * width;
    p.keys = keys.typed_data() + matrix * length * width;
    p.values = values.typed_data() + matrix * length * value_width;
    p.out = out->typed_data() + matrix * num_queries * value_width;
    if (p.seen <= 0) {
      std::fill_n(p.out, num_queries * value_width, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    std::vector<float> weights(static_cast<size_t>(p.seen));
    p.weights = weights.data();
    kernels.attend(p);
  };
  // Waking another thread costs about what 2^18 products do.
  NoPool nobody;
  const bool alone = 2 * matrices * num_queries * length * width < (int64_t{1} << 18);
  alone ? ParallelFor(nobody, matrices, run) : ParallelFor(pool, matrices, run);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxAttend, mx::Attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale"));
