// The handler of scaled products: checks every shape, dtype and attribute, then runs the kernels.
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/float_environment.h"
#include "common/macros.h"
#include "common/tiny.h"
#include "products/problem.h"
#include "products/run.h"
#include "products/weights.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

// One operand as it came: `[*batch, rows, k]`, or `[*batch, k, rows]` if k_first. Of two-dimensional
// blocks, `block_rows` rows share their scales, which `spread` has for each row.
struct Operand {
  const char* side;
  ffi::AnyBuffer elements, scales;
  std::string_view element, scale;
  bool k_first;
  int32_t block_rows = 1;
  std::vector<uint8_t> spread{};

  int64_t rank() const { return static_cast<int64_t>(elements.dimensions().size()); }
  int64_t rows() const { return elements.dimensions()[rank() - (k_first ? 1 : 2)]; }
  int64_t k() const { return elements.dimensions()[rank() - (k_first ? 2 : 1)]; }
};

ffi::Error ParseHighPrecision(const Operand& operand, Source* source) {
  FloatType type{};
  MX_RETURN_IF_ERROR(
      ParseFloatType(operand.elements, &type, "matmul: ", operand.side, "_element='none'"));
  source->element = static_cast<Element>(kElementFloat32 + static_cast<int32_t>(type));
  source->scale_kind = kNoScale;
  source->scales = nullptr;
  return ffi::Error::Success();
}

// The format of an operand of codes, by the names of its elements and of its scales.
ffi::Error ParseFormat(const char* side, std::string_view element, std::string_view scale,
                       Source* source) {
  if (!FindName(kElementNames, element, &source->element)) {
    return InvalidArgument("mx_jax matmul: unknown ", side, "_element='", element, "'");
  }
  if (!FindName(kScaleNames, scale, &source->scale_kind) || source->scale_kind == kNoScale) {
    return InvalidArgument("mx_jax matmul: unknown ", side, "_scale='", scale, "'");
  }
  return ffi::Error::Success();
}

// Scales of two-dimensional blocks once for each row.
void SpreadScales(Operand& operand, int64_t blocks) {
  const int64_t rows = operand.rows(), inner = operand.k_first ? 1 : blocks;
  const int64_t squares = (rows + operand.block_rows - 1) / operand.block_rows;
  if (squares * inner == 0) return;
  const int64_t slices = static_cast<int64_t>(operand.scales.element_count()) / (squares * inner);
  const uint8_t* from = static_cast<const uint8_t*>(operand.scales.untyped_data());
  operand.spread.resize(slices * rows * inner);
  uint8_t* to = operand.spread.data();
  for (int64_t index = 0; index < slices * squares; ++index, from += inner) {
    const int64_t first = index % squares * operand.block_rows;
    const int64_t count = std::min<int64_t>(operand.block_rows, rows - first);
    if (inner == 1) std::fill_n(to, count, *from);
    for (int64_t row = 0; inner != 1 && row < count; ++row) std::copy_n(from, inner, to + row * inner);
    to += count * inner;
  }
}

ffi::Error ParseCodes(Operand& operand, Source* source) {
  MX_RETURN_IF_ERROR(ParseFormat(operand.side, operand.element, operand.scale, source));
  if (operand.elements.element_type() != ffi::U8 || operand.scales.element_type() != ffi::U8) {
    return InvalidArgument("mx_jax matmul: codes and scales must be uint8, got another dtype for ",
                           operand.side, "_element='", operand.element, "'");
  }
  const auto shape = operand.elements.dimensions();
  std::vector<int64_t> expected(shape.begin(), shape.end());
  int64_t& along = expected[operand.rank() - (operand.k_first ? 2 : 1)];
  along = (along + source->block - 1) / source->block;
  int64_t& across = expected[operand.rank() - (operand.k_first ? 1 : 2)];
  across = (across + operand.block_rows - 1) / operand.block_rows;
  if (!SameShape(operand.scales.dimensions(), expected)) {
    return InvalidArgument("mx_jax matmul: ", operand.side, "_scales must have shape ",
                           Shape(expected), " for codes of shape ", Shape(shape),
                           " and block=", source->block, ", block_rows=", operand.block_rows, ", got ",
                           Shape(operand.scales.dimensions()));
  }
  source->scales = static_cast<const uint8_t*>(operand.scales.untyped_data());
  if (operand.block_rows != 1) {
    SpreadScales(operand, along);
    source->scales = operand.spread.data();
  }
  return ffi::Error::Success();
}

ffi::Error ParseOperand(Operand& operand, int32_t block, Source* source) {
  if (operand.rank() < 2) {
    return InvalidArgument("mx_jax matmul: ", operand.side,
                           " must be [*batch, rows, k], got shape ",
                           Shape(operand.elements.dimensions()));
  }
  if (operand.block_rows < 1) {
    return InvalidArgument("mx_jax matmul: ", operand.side, "_block_rows must be above 0, got ",
                           operand.side, "_block_rows=", operand.block_rows);
  }
  source->block = block;
  source->elements = operand.elements.untyped_data();
  source->rows = operand.rows();
  source->k = operand.k();
  const int64_t blocks = (source->k + block - 1) / block;
  source->row_stride = operand.k_first ? 1 : source->k;
  source->k_stride = operand.k_first ? source->rows : 1;
  source->scale_row_stride = operand.k_first ? 1 : blocks;
  source->scale_block_stride = operand.k_first ? source->rows : 1;
  return operand.element == "none" ? ParseHighPrecision(operand, source)
                                   : ParseCodes(operand, source);
}

using Dimensions = ffi::Span<const int64_t>;

// Which of the arrays along an operand's first axes product `index` takes: an axis of one is repeated.
int64_t MatrixAt(Dimensions operand, Dimensions out, int64_t index) {
  int64_t place = 0, step = 1;
  for (int64_t axis = static_cast<int64_t>(out.size()) - 3; axis >= 0; --axis) {
    if (operand[axis] != 1) place += index % out[axis] * step;
    index /= out[axis];
    step *= operand[axis];
  }
  return place;
}

// Whether an operand's first axes are those of the product's batch, or one.
bool FitsBatch(Dimensions operand, Dimensions out) {
  if (operand.size() + 2 < out.size()) return false;
  for (size_t axis = 0; axis + 2 < out.size(); ++axis) {
    if (operand[axis] != out[axis] && operand[axis] != 1) return false;
  }
  return true;
}

// Which product of each operand every product of the batch takes. Both operands have two more axes
// than their batch.
bool FindProducts(Dimensions lhs, int64_t lhs_rows, Dimensions rhs, int64_t rhs_rows,
                  Dimensions out, std::vector<Product>* products) {
  const size_t rank = out.size();
  if (rank < 2 || lhs.size() != rank || rhs.size() != rank) return false;
  if (out[rank - 2] != lhs_rows || out[rank - 1] != rhs_rows) return false;
  if (!FitsBatch(lhs, out) || !FitsBatch(rhs, out)) return false;
  int64_t batch = 1;
  for (size_t axis = 0; axis + 2 < rank; ++axis) batch *= out[axis];
  products->resize(batch);
  for (int64_t index = 0; index < batch; ++index) {
    (*products)[index] = {MatrixAt(lhs, out, index), MatrixAt(rhs, out, index)};
  }
  return true;
}

// Packed weights as rhs: `[*batch, panels, panel_bytes]`, which stand for `[*batch, rows, k]`.
ffi::Error ParseWeights(const ffi::AnyBuffer& weights, std::string_view element,
                        std::string_view scale, int32_t block, int64_t rows, int64_t k,
                        Source* source) {
  Source like{};
  MX_RETURN_IF_ERROR(ParseFormat("rhs", element, scale, &like));
  like.block = block;
  like.rows = rows;
  like.k = k;
  const WeightSizes sizes = SizesOfWeights(like.element, block, rows, k);
  const Dimensions shape = weights.dimensions();
  const size_t rank = shape.size();
  if (weights.element_type() != ffi::U8 || rank < 2 || shape[rank - 2] != sizes.panels ||
      shape[rank - 1] != sizes.panel_bytes) {
    return InvalidArgument("mx_jax matmul: packed weights of rows=", rows, ", k=", k,
                           ", block=", block, ", rhs_element='", element,
                           "' must be uint8 of shape [*batch, ", sizes.panels, ", ",
                           sizes.panel_bytes, "], got ", Shape(shape));
  }
  *source = PackedSource(like, static_cast<const uint8_t*>(weights.untyped_data()));
  return ffi::Error::Success();
}

// Whether weights were packed as this library packs them.
ffi::Error CheckMark(const Source& weights, size_t num_bytes) {
  if (num_bytes == 0 || SummaryOf(weights, 0).mark == kPanelMark) return ffi::Error::Success();
  return InvalidArgument(
      "mx_jax matmul: packed weights must lie as this version packs them, got mark=",
      SummaryOf(weights, 0).mark, ", not ", kPanelMark,
      ": they come from another version, as in an exported program or a pickle; pack them again");
}

using TensorScales = ffi::Buffer<ffi::F32>;

// Shape (0,): there are none.
bool HasScales(const TensorScales& scales) {
  return scales.dimensions().size() != 1 || scales.dimensions()[0] != 0;
}

ffi::Error CheckTensorScales(const char* side, const TensorScales& scales, Dimensions out) {
  if (!HasScales(scales)) return ffi::Error::Success();
  const Dimensions shape = scales.dimensions();
  bool fits = FitsBatch(shape, out);
  for (size_t axis = out.size() - 2; fits && axis < shape.size(); ++axis) fits = shape[axis] == 1;
  if (fits) return ffi::Error::Success();
  return InvalidArgument("mx_jax matmul: ", side, "_tensor_scale must be of shape (0,), or one ",
                         "number for each matrix of the batch or repeated along its axes, got ",
                         side, "_tensor_scale.shape=", Shape(shape), " for a product of shape ",
                         Shape(out));
}

// The factors of a problem whose products are known: of each, or one of all.
ffi::Error FindFactors(const TensorScales& lhs, const TensorScales& rhs, Dimensions out,
                       MatmulProblem* problem) {
  MX_RETURN_IF_ERROR(CheckTensorScales("lhs", lhs, out));
  MX_RETURN_IF_ERROR(CheckTensorScales("rhs", rhs, out));
  const bool one = lhs.element_count() <= 1 && rhs.element_count() <= 1;
  problem->factors.resize(one ? 1 : problem->products.size());
  if (problem->products.empty()) return ffi::Error::Success();
  KeepSubnormals environment;
  for (size_t i = 0; i < problem->factors.size(); ++i) {
    const auto scale = [&](const TensorScales& scales) {
      if (!HasScales(scales)) return 1.0f;
      return scales.typed_data()[MatrixAt(scales.dimensions(), out, static_cast<int64_t>(i))];
    };
    problem->factors[i] = FactorsOf(scale(lhs), scale(rhs));
  }
  return ffi::Error::Success();
}

ffi::Error CheckBlock(int32_t block) {
  if (block == 16 || block == 32) return ffi::Error::Success();
  return InvalidArgument("mx_jax matmul: block must be 16 or 32, got block=", block);
}

const MatmulKernels* const kKernels[kNumIsas] = MX_PRODUCT_KERNELS(kMatmul);

// What both products have in common: rhs, which was read too, has `columns` rows.
ffi::Error Multiply(ffi::ThreadPool pool, const Operand& left, Dimensions rhs, int64_t columns,
                    TensorScales lhs_tensor_scale, TensorScales rhs_tensor_scale,
                    ffi::AnyBuffer out, MatmulProblem problem) {
  const Dimensions shape = out.dimensions(), lhs = left.elements.dimensions();
  if (!FindProducts(lhs, left.rows(), rhs, columns, shape, &problem.products)) {
    return InvalidArgument("mx_jax matmul: the product's shape ", Shape(shape),
                           " does not follow from lhs.shape=", Shape(lhs),
                           ", rhs.shape=", Shape(rhs), ", lhs_k_first=", left.k_first, ", for ",
                           columns, " rows of rhs");
  }
  MX_RETURN_IF_ERROR(FindFactors(lhs_tensor_scale, rhs_tensor_scale, shape, &problem));
  MX_RETURN_IF_ERROR(ParseFloatType(out, &problem.out_type, "matmul: the product"));
  problem.out = out.untyped_data();
  RunMatmul(pool, Pick(kKernels), problem);
  return ffi::Error::Success();
}

ffi::Error MatmulPacked(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scales,
                        TensorScales lhs_tensor_scale, ffi::AnyBuffer weights,
                        TensorScales rhs_tensor_scale, ffi::Result<ffi::AnyBuffer> out,
                        std::string_view lhs_element, std::string_view rhs_element,
                        std::string_view lhs_scale, std::string_view rhs_scale, int32_t block,
                        bool lhs_k_first, int32_t lhs_block_rows) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  Operand left{"lhs", lhs, lhs_scales, lhs_element, lhs_scale, lhs_k_first, lhs_block_rows};
  MatmulProblem problem{};
  MX_RETURN_IF_ERROR(ParseOperand(left, block, &problem.lhs));
  const Dimensions shape = out->dimensions();
  const int64_t columns = shape.size() < 2 ? 0 : shape[shape.size() - 1];
  MX_RETURN_IF_ERROR(ParseWeights(weights, rhs_element, rhs_scale, block, columns, left.k(),
                                  &problem.rhs));
  MX_RETURN_IF_ERROR(CheckMark(problem.rhs, weights.size_bytes()));
  return Multiply(pool, left, weights.dimensions(), columns, lhs_tensor_scale, rhs_tensor_scale,
                  *out, problem);
}

ffi::Error PackWeightsOf(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                         ffi::Result<ffi::AnyBuffer> out, std::string_view element,
                         std::string_view scale, int32_t block, bool k_first) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  Operand operand{"rhs", codes, scales, element, scale, k_first};
  Source source{};
  MX_RETURN_IF_ERROR(ParseOperand(operand, block, &source));
  Source packed{};
  const Dimensions from = codes.dimensions(), to = out->dimensions();
  bool fits = source.scale_kind != kNoScale && to.size() == from.size();
  int64_t batch = 1;
  for (size_t axis = 0; fits && axis + 2 < from.size(); ++axis) {
    fits = from[axis] == to[axis];
    batch *= from[axis];
  }
  if (!fits) {
    return InvalidArgument("mx_jax pack_weights: needs codes [*batch, rows, k], or [*batch, k, ",
                           "rows] if k_first, and as many axes of panels, got codes.shape=",
                           Shape(from), ", element='", element, "', panels.shape=", Shape(to));
  }
  MX_RETURN_IF_ERROR(ParseWeights(*out, element, scale, block, source.rows, source.k, &packed));
  uint8_t* panels = static_cast<uint8_t*>(out->untyped_data());
  const MatmulKernels& kernels = Pick(kKernels);
  const WeightSizes sizes = SizesOfWeights(source.element, block, source.rows, source.k);
  ParallelFor(pool, batch * sizes.panels, [&](int64_t task) {
    const Source matrix = MatrixOf(source, task / sizes.panels);
    kernels.pack_codes(matrix, task % sizes.panels * kTileColumns,
                       panels + task * sizes.panel_bytes);
  });
  return ffi::Error::Success();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scales,
                  TensorScales lhs_tensor_scale, ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scales,
                  TensorScales rhs_tensor_scale, ffi::Result<ffi::AnyBuffer> out,
                  std::string_view lhs_element, std::string_view rhs_element,
                  std::string_view lhs_scale, std::string_view rhs_scale, int32_t block,
                  bool lhs_k_first, bool rhs_k_first, int32_t lhs_block_rows,
                  int32_t rhs_block_rows) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  Operand left{"lhs", lhs, lhs_scales, lhs_element, lhs_scale, lhs_k_first, lhs_block_rows};
  Operand right{"rhs", rhs, rhs_scales, rhs_element, rhs_scale, rhs_k_first, rhs_block_rows};
  MatmulProblem problem{};
  MX_RETURN_IF_ERROR(ParseOperand(left, block, &problem.lhs));
  MX_RETURN_IF_ERROR(ParseOperand(right, block, &problem.rhs));
  if (left.k() != right.k()) {
    return InvalidArgument("mx_jax matmul: both operands must have one k, got lhs.shape=",
                           Shape(lhs.dimensions()), ", rhs.shape=", Shape(rhs.dimensions()),
                           ", lhs_k_first=", lhs_k_first, ", rhs_k_first=", rhs_k_first);
  }
  return Multiply(pool, left, rhs.dimensions(), right.rows(), lhs_tensor_scale, rhs_tensor_scale,
                  *out, problem);
}

}  // namespace
}  // namespace mx

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxMatmul, mx::Matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("lhs_element")
                                  .Attr<std::string_view>("rhs_element")
                                  .Attr<std::string_view>("lhs_scale")
                                  .Attr<std::string_view>("rhs_scale")
                                  .Attr<int32_t>("block")
                                  .Attr<bool>("lhs_k_first")
                                  .Attr<bool>("rhs_k_first")
                                  .Attr<int32_t>("lhs_block_rows")
                                  .Attr<int32_t>("rhs_block_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxMatmulPacked, mx::MatmulPacked,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("lhs_element")
                                  .Attr<std::string_view>("rhs_element")
                                  .Attr<std::string_view>("lhs_scale")
                                  .Attr<std::string_view>("rhs_scale")
                                  .Attr<int32_t>("block")
                                  .Attr<bool>("lhs_k_first")
                                  .Attr<int32_t>("lhs_block_rows"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxPackWeights, mx::PackWeightsOf,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("element")
                                  .Attr<std::string_view>("scale")
                                  .Attr<int32_t>("block")
                                  .Attr<bool>("k_first"));
