// Attention, a matrix of keys at a time, by rows of keys and values from wherever they come.
#ifndef MX_JAX_CUSTOM_CALLS_ATTENTION_RUN_H_
#define MX_JAX_CUSTOM_CALLS_ATTENTION_RUN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "attention/attend.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

// The kernels of the instruction set that runs.
inline const AttendKernels& ChosenAttendKernels() {
  static const AttendKernels* const kKernels[kNumIsas] = MX_KERNELS(kAttend);
  return Pick(kKernels);
}

using Floats = xla::ffi::Buffer<xla::ffi::F32>;
using Positions = xla::ffi::Buffer<xla::ffi::S32>;
using Extents = xla::ffi::Span<const int64_t>;

inline int64_t FromEnd(Extents shape, size_t axis) { return shape[shape.size() - axis]; }

// Queries and the output `[*batch, matrices, queries, width]`, rows of keys or of values `[*batch,
// matrices, length, ...]`, a position `[*batch, 1]` for each entry of the batch: whether what
// comes before the last two axes agrees.
inline bool SameMatrices(Extents queries, Extents rows, Extents position, Extents out) {
  const size_t rank = rows.size();
  if (rank < 3 || queries.size() != rank || out.size() != rank || position.size() != rank - 2 ||
      position[rank - 3] != 1 || FromEnd(out, 2) != FromEnd(queries, 2)) {
    return false;
  }
  for (size_t axis = 0; axis + 2 < rank; ++axis) {
    const int64_t size = rows[axis];
    if (queries[axis] != size || out[axis] != size) return false;
    if (axis + 3 < rank && position[axis] != size) return false;
  }
  return true;
}

struct AttendCall {
  Floats queries;
  Positions position;
  Floats out;
  int64_t length;
  float scale;
};

// Keys and values: read(matrix, first, count) gives that many rows as float32, which stay until the
// next ones are asked for; at most `run` of them. Each task has a copy of its own.
template <class Pool, class Rows>
void RunAttend(Pool& pool, const AttendKernels& kernels, const AttendCall& call, const Rows& keys,
               const Rows& values) {
  const Extents shape = call.queries.dimensions(), out = call.out.dimensions();
  const int64_t together = FromEnd(shape, 3), num_queries = FromEnd(shape, 2);
  const int64_t matrices = static_cast<int64_t>(call.position.element_count()) * together;
  const auto run = [&](int64_t matrix) {
    AttendProblem p{};
    const int64_t last = call.position.typed_data()[matrix / together];
    p.num_queries = num_queries, p.width = FromEnd(shape, 1), p.value_width = FromEnd(out, 1);
    p.seen = std::min(call.length, last + 1);
    p.scale = call.scale;
    p.queries = call.queries.typed_data() + matrix * num_queries * p.width;
    p.out = call.out.typed_data() + matrix * num_queries * p.value_width;
    if (p.seen <= 0) {
      std::fill_n(p.out, num_queries * p.value_width, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    const size_t working = static_cast<size_t>(num_queries * (p.seen + 1));
    const std::unique_ptr<float[]> memory(new float[working]);
    p.weights = memory.get(), p.sums = p.weights + num_queries * p.seen;
    const auto by_runs = [&](Rows rows, auto kernel) {
      for (int64_t first = 0; first < p.seen; first += rows.run) {
        const int64_t count = std::min(rows.run, p.seen - first);
        kernel(p, rows.read(matrix, first, count), first, count);
      }
    };
    by_runs(keys, kernels.score);
    kernels.weigh(p);
    by_runs(values, kernels.add);
  };
  // Waking another thread costs about what 2^18 products do.
  NoPool nobody;
  const bool alone =
      2 * matrices * num_queries * call.length * FromEnd(shape, 1) < (int64_t{1} << 18);
  alone ? ParallelFor(nobody, matrices, run) : ParallelFor(pool, matrices, run);
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_ATTENTION_RUN_H_
