// The handlers of attention, over float32 and over codes, which are decoded a few rows at a time on
// their way to the kernels.
#include "attention/attend.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "casts/decoding.h"
#include "casts/lift.h"
#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "common/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// The kernels of the instruction set that runs.
const AttendKernels& ChosenAttendKernels() {
  static const AttendKernels* const kKernels[kNumIsas] = MX_KERNELS(kAttend);
  return Pick(kKernels);
}

using Floats = ffi::Buffer<ffi::F32>;
using Positions = ffi::Buffer<ffi::S32>;
using Extents = ffi::Span<const int64_t>;

int64_t FromEnd(Extents shape, size_t axis) { return shape[shape.size() - axis]; }

// Queries and the output `[*batch, matrices, queries, width]`, rows of keys or of values `[*batch,
// matrices, length, ...]`, a position `[*batch, 1]` for each entry of the batch: whether what
// comes before the last two axes agrees.
bool SameMatrices(Extents queries, Extents rows, Extents position, Extents out) {
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

// Over float32 ------------------------------------------------------------------------------------

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

// Over codes --------------------------------------------------------------------------------------

// Values that are decoded at once: they stay in the first-level cache.
constexpr int64_t kDecodedAtOnce = 4096;

// What both operands of codes share.
struct Coded {
  DequantizePlan plan{};  // of one row
  int64_t length = 0;     // rows of a matrix
  int64_t row_bytes = 0;
  bool is_packed = false;  // two codes a byte
  const AttendKernels* kernels = nullptr;
};

// Keys or values. `read` gives what the dequantizing handler gives of the same codes, bit for bit.
struct CodedRows {
  const Coded* coded;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t scale_bytes;         // of a row
  const float* tensor_scales;  // or null
  int64_t rows_per_scale;      // of a tensor scale
  int64_t run;
  std::vector<float> values{};
  std::vector<uint8_t> unpacked{};

  const float* read(int64_t matrix, int64_t first, int64_t count) {
    const int64_t row = matrix * coded->length + first, width = coded->plan.length;
    values.resize(static_cast<size_t>(run * width));
    DequantizePlan plan = coded->plan;
    plan.codes = codes + row * coded->row_bytes;
    plan.ahead = coded->is_packed ? 0 : run * width;
    if (coded->is_packed) {
      unpacked.resize(static_cast<size_t>(run * width));
      coded->kernels->unpack(plan.codes, count, width, unpacked.data());
      plan.codes = unpacked.data();
    }
    plan.scales = scales + row * scale_bytes;
    plan.out = values.data();
    plan.outer = count;
    if (tensor_scales != nullptr) {
      plan.tensor_scales = tensor_scales + row / rows_per_scale;
      plan.num_tensor_scales = rows_per_scale == 1 ? count : 1;
    }
    NoPool nobody;
    DequantizeBlocks(nobody, count * width, plan, ChosenDequantizeKernels());
    return values.data();
  }
};

// What is wrong with codes `[*batch, matrices, length, bytes]` and what belongs to them, or null.
const char* Mismatch(const Coded& coded, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                     Extents queries, Extents position, Extents out) {
  const Extents shape = codes.dimensions(), of_scales = scales.dimensions();
  if (codes.element_type() != ffi::U8 || !SameMatrices(queries, shape, position, out)) {
    return "codes must be uint8 [*batch, matrices, length, bytes of a row]";
  }
  if (FromEnd(shape, 2) != coded.length || FromEnd(shape, 1) != coded.row_bytes) {
    return "keys and values must be alike, rows as wide as queries at their codes' width";
  }
  bool alike = of_scales.size() == shape.size() &&
               scales.element_type() == (HasByteScales(coded.plan) ? ffi::U8 : ffi::F32) &&
               FromEnd(of_scales, 1) == coded.plan.blocks_per_row;
  for (size_t axis = 0; alike && axis + 1 < shape.size(); ++axis) {
    alike = of_scales[axis] == shape[axis];
  }
  return alike ? nullptr : "scales must be [*batch, matrices, length, blocks of a row]";
}

// Its tensor scale, if it has one: one for each entry of the batch, or for each row.
ffi::Error TakeRowScale(const ffi::RemainingArgs& rest, size_t index, int64_t entries, int64_t rows,
                        CodedRows* coded_rows) {
  auto scale = rest.get<ffi::AnyBuffer>(index);
  if (scale.has_error()) return scale.error();
  const int64_t count = static_cast<int64_t>(scale->element_count());
  if (scale->element_type() != ffi::F32 ||
      (rows != 0 && count != 1 && count != entries && count != rows)) {
    return InvalidArgument("mx_jax attend: tensor scales must be float32, one, ", entries,
                           " or one for each of ", rows, " rows, got tensor_scale.shape=",
                           Shape(scale->dimensions()));
  }
  coded_rows->tensor_scales = static_cast<const float*>(scale->untyped_data());
  coded_rows->rows_per_scale = count == 0 ? 1 : rows / count;
  return ffi::Error::Success();
}

ffi::Error ReadCoded(const ffi::Dictionary& attributes, Extents queries, Extents codes,
                     Coded* coded) {
  int64_t block = 0;
  MX_RETURN_IF_ERROR(ReadFormat("attend", attributes, &coded->plan));
  MX_RETURN_IF_ERROR(ReadAttribute("attend", attributes, "block", &block));
  MX_RETURN_IF_ERROR(ReadAttribute("attend", attributes, "is_packed", &coded->is_packed));
  if (queries.size() < 3 || codes.size() < 3 || block < 1 ||
      (coded->is_packed && coded->plan.element.bits > 4)) {
    return InvalidArgument("mx_jax attend: needs three axes at least, blocks of at least 1, and ",
                           "is_packed for at most four bits, got queries.shape=", Shape(queries),
                           ", codes.shape=", Shape(codes), ", block=", block);
  }
  const int64_t width = FromEnd(queries, 1);
  DequantizePlan& plan = coded->plan;
  plan.type = FloatType::kF32;
  plan.length = width, plan.inner = 1, plan.rows = 1;
  plan.block = std::min(block, kLongestBlock);
  plan.blocks_per_row = CeilDivide(width, plan.block);
  coded->length = FromEnd(codes, 2);
  coded->row_bytes = coded->is_packed ? CeilDivide(width, 2) : width;
  coded->kernels = &ChosenAttendKernels();
  return ffi::Error::Success();
}

CodedRows RowsOf(const Coded& coded, ffi::AnyBuffer codes, ffi::AnyBuffer scales) {
  const int64_t width = std::max<int64_t>(coded.plan.length, 1);
  const int64_t scale_bytes = coded.plan.blocks_per_row * (HasByteScales(coded.plan) ? 1 : 4);
  return CodedRows{&coded,
                   static_cast<const uint8_t*>(codes.untyped_data()),
                   static_cast<const uint8_t*>(scales.untyped_data()),
                   scale_bytes,
                   nullptr,
                   1,
                   std::max<int64_t>(kDecodedAtOnce / width, 8)};
}

ffi::Error AttendCodes(ffi::ThreadPool pool, Floats queries, ffi::AnyBuffer key_codes,
                       ffi::AnyBuffer key_scales, ffi::AnyBuffer value_codes,
                       ffi::AnyBuffer value_scales, Positions position, ffi::RemainingArgs rest,
                       ffi::Result<Floats> out, ffi::Dictionary attributes) {
  Coded coded;
  float scale = 0;
  const Extents shape = queries.dimensions(), result = out->dimensions();
  MX_RETURN_IF_ERROR(ReadAttribute("attend", attributes, "scale", &scale));
  MX_RETURN_IF_ERROR(ReadCoded(attributes, shape, key_codes.dimensions(), &coded));
  CodedRows sides[] = {RowsOf(coded, key_codes, key_scales),
                       RowsOf(coded, value_codes, value_scales)};
  const ffi::AnyBuffer operands[][2] = {{key_codes, key_scales}, {value_codes, value_scales}};
  if (rest.size() != 0 && rest.size() != 2) {
    return InvalidArgument("mx_jax attend: needs two tensor scales or none, got ", rest.size());
  }
  for (size_t side = 0; side < 2; ++side) {
    const auto& [codes, scales] = operands[side];
    const char* wrong = Mismatch(coded, codes, scales, shape, position.dimensions(), result);
    if (wrong != nullptr || FromEnd(result, 1) != FromEnd(shape, 1)) {
      return InvalidArgument("mx_jax attend: ", wrong == nullptr ? "out must be like queries" : wrong,
                             ", got queries.shape=", Shape(shape), ", codes.shape=",
                             Shape(codes.dimensions()), ", scales.shape=",
                             Shape(scales.dimensions()), ", position.shape=",
                             Shape(position.dimensions()), ", out.shape=", Shape(result));
    }
    if (rest.size() == 0) continue;
    const int64_t entries = static_cast<int64_t>(position.element_count());
    const int64_t rows = entries * FromEnd(shape, 3) * coded.length;
    MX_RETURN_IF_ERROR(TakeRowScale(rest, side, entries, rows, &sides[side]));
  }
  const AttendCall call{queries, position, *out, coded.length, scale};
  RunAttend(pool, *coded.kernels, call, sides[0], sides[1]);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxAttendCodes, mx::AttendCodes,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attrs());
