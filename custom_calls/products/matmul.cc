// The handler of scaled products: checks every shape, dtype and attribute, then runs the kernels.
#include <cstdint>
#include <string_view>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "products/operands.h"
#include "products/run.h"
#include "products/weights.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

const MatmulKernels* const kKernels[kNumIsas] = MX_PRODUCT_KERNELS(kMatmul);

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
  if (!FindProducts(lhs.dimensions(), left.rows(), weights.dimensions(), columns, shape,
                    &problem.products)) {
    return InvalidArgument("mx_jax matmul: the product of packed weights, ", Shape(shape),
                           ", does not follow from lhs.shape=", Shape(lhs.dimensions()),
                           ", weights.shape=", Shape(weights.dimensions()),
                           ", lhs_k_first=", lhs_k_first);
  }
  MX_RETURN_IF_ERROR(
      FindFactors(lhs_tensor_scale, rhs_tensor_scale, out->dimensions(), &problem));
  MX_RETURN_IF_ERROR(ParseOut(*out, &problem.out_type));
  problem.out = out->untyped_data();
  RunMatmul(pool, Pick(kKernels), problem);
  return ffi::Error::Success();
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
  if (!FindProducts(lhs.dimensions(), left.rows(), rhs.dimensions(), right.rows(),
                    out->dimensions(), &problem.products)) {
    return InvalidArgument("mx_jax matmul: the product's shape ", Shape(out->dimensions()),
                           " does not follow from lhs.shape=", Shape(lhs.dimensions()),
                           ", rhs.shape=", Shape(rhs.dimensions()), ", lhs_k_first=", lhs_k_first,
                           ", rhs_k_first=", rhs_k_first);
  }
  MX_RETURN_IF_ERROR(
      FindFactors(lhs_tensor_scale, rhs_tensor_scale, out->dimensions(), &problem));
  MX_RETURN_IF_ERROR(ParseOut(*out, &problem.out_type));
  problem.out = out->untyped_data();
  RunMatmul(pool, Pick(kKernels), problem);
  return ffi::Error::Success();
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
