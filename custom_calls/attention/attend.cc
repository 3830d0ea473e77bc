// The handler of attention over float32: checks every shape and dtype, then runs the kernels.
#include "attention/attend.h"

#include <cstdint>

#include "attention/run.h"
#include "common/checks.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// Rows as they lie, all of a matrix in one run.
struct FloatRows {
  const float* data;
  int64_t run, width;
  const float* read(int64_t matrix, int64_t first, int64_t) const {
    return data + (matrix * run + first) * width;
  }
};

bool Fits(Extents queries, Extents keys, Extents values, Extents position, Extents out) {
  if (!SameMatrices(queries, keys, position, out) || values.size() != keys.size()) return false;
  for (size_t axis = 0; axis + 1 < keys.size(); ++axis) {
    if (values[axis] != keys[axis]) return false;
  }
  return FromEnd(queries, 1) == FromEnd(keys, 1) && FromEnd(out, 1) == FromEnd(values, 1);
}

ffi::Error Attend(ffi::ThreadPool pool, Floats queries, Floats keys, Floats values,
                  Positions position, ffi::Result<Floats> out, float scale) {
  const Extents shape = keys.dimensions();
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
  const int64_t length = FromEnd(shape, 2);
  RunAttend(pool, ChosenAttendKernels(), AttendCall{queries, position, *out, length, scale},
            FloatRows{keys.typed_data(), length, FromEnd(shape, 1)},
            FloatRows{values.typed_data(), length, FromEnd(values.dimensions(), 1)});
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
