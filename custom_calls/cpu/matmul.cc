// The handler of scaled products: checks every shape, dtype and attribute, then runs the kernels.
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/checks.h"
#include "common/dispatch.h"
#include "common/macros.h"
#include "cpu/matmul_run.h"
#include "cpu/weights.h"
#include "xla/ffi/api/ffi.h"

namespace mx {
namespace {

namespace ffi = xla::ffi;

#if MX_X86
const MatmulKernels* const kKernels[kNumIsas] = {&kMatmulPortable, &kMatmulAvx2, &kMatmulAvx512,
                                                 &kMatmulAvx512Vnni, &kMatmulAvx512Bf16};
#else
const MatmulKernels* const kKernels[kNumIsas] = {&kMatmulPortable};
#endif

constexpr const char* kElementNames[] = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8"};

// One operand as it came: `[*batch, rows, k]`, or `[*batch, k, rows]` if k_first.
struct Operand {
  const char* side;
  ffi::AnyBuffer elements, scales;
  std::string_view element, scale;
  bool k_first;

  int64_t rank() const { return static_cast<int64_t>(elements.dimensions().size()); }
  int64_t batch_axis(int64_t axis) const { return elements.dimensions()[axis]; }
  int64_t rows() const { return elements.dimensions()[rank() - (k_first ? 1 : 2)]; }
  int64_t k() const { return elements.dimensions()[rank() - (k_first ? 2 : 1)]; }
};

ffi::Error ParseHighPrecision(const Operand& operand, Source* source) {
  switch (operand.elements.element_type()) {
    case ffi::F32:
      source->element = kElementFloat32;
      break;
    case ffi::BF16:
      source->element = kElementBf16;
      break;
    case ffi::F16:
      source->element = kElementF16;
      break;
    default:
      return InvalidArgument("mx_jax matmul: ", operand.side, "_element='none' needs float32, ",
                             "bfloat16 or float16, got another dtype of shape ",
                             Shape(operand.elements.dimensions()));
  }
  source->scale_kind = kNoScale;
  source->scales = nullptr;
  return ffi::Error::Success();
}

ffi::Error ParseCodes(const Operand& operand, Source* source) {
  const auto* name = std::find(std::begin(kElementNames), std::end(kElementNames), operand.element);
  if (name == std::end(kElementNames)) {
    return InvalidArgument("mx_jax matmul: unknown ", operand.side, "_element='", operand.element,
                           "'");
  }
  if (operand.elements.element_type() != ffi::U8 || operand.scales.element_type() != ffi::U8) {
    return InvalidArgument("mx_jax matmul: codes and scales must be uint8, got another dtype for ",
                           operand.side, "_element='", operand.element, "'");
  }
  if (operand.scale != "e8m0" && operand.scale != "e4m3") {
    return InvalidArgument("mx_jax matmul: unknown ", operand.side, "_scale='", operand.scale, "'");
  }
  const auto shape = operand.elements.dimensions();
  std::vector<int64_t> expected(shape.begin(), shape.end());
  int64_t& along = expected[operand.rank() - (operand.k_first ? 2 : 1)];
  along = (along + source->block - 1) / source->block;
  if (!SameShape(operand.scales.dimensions(), expected)) {
    return InvalidArgument("mx_jax matmul: ", operand.side, "_scales must have shape ",
                           Shape(expected), " for codes of shape ", Shape(shape),
                           " and block=", source->block, ", got ",
                           Shape(operand.scales.dimensions()));
  }
  source->element = static_cast<Element>(name - std::begin(kElementNames));
  source->scale_kind = operand.scale == "e8m0" ? kScaleE8M0 : kScaleE4M3;
  source->scales = static_cast<const uint8_t*>(operand.scales.untyped_data());
  return ffi::Error::Success();
}

ffi::Error ParseOperand(const Operand& operand, int32_t block, Source* source) {
  if (operand.rank() < 2) {
    return InvalidArgument("mx_jax matmul: ", operand.side,
                           " must be [*batch, rows, k], got shape ",
                           Shape(operand.elements.dimensions()));
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

// Which product of each operand every product of the batch takes: axes of one are repeated.
ffi::Error FindProducts(const Operand& lhs, const Operand& rhs, const ffi::AnyBuffer& out,
                        std::vector<Product>* products) {
  const auto shape = out.dimensions();
  const int64_t rank = static_cast<int64_t>(shape.size());
  bool fits = lhs.rank() == rank && rhs.rank() == rank && rank >= 2 &&
              shape[rank - 2] == lhs.rows() && shape[rank - 1] == rhs.rows();
  int64_t batch = 1;
  for (int64_t axis = 0; fits && axis < rank - 2; ++axis) {
    const int64_t left = lhs.batch_axis(axis), right = rhs.batch_axis(axis);
    fits = (left == shape[axis] || left == 1) && (right == shape[axis] || right == 1);
    batch *= shape[axis];
  }
  if (!fits) {
    return InvalidArgument("mx_jax matmul: the product's shape ", Shape(shape),
                           " does not follow from lhs.shape=", Shape(lhs.elements.dimensions()),
                           ", rhs.shape=", Shape(rhs.elements.dimensions()),
                           ", lhs_k_first=", lhs.k_first, ", rhs_k_first=", rhs.k_first);
  }
  products->resize(batch);
  for (int64_t index = 0; index < batch; ++index) {
    Product product{0, 0};
    int64_t rest = index, left_step = 1, right_step = 1;
    for (int64_t axis = rank - 3; axis >= 0; --axis) {
      const int64_t at = rest % shape[axis];
      rest /= shape[axis];
      product.lhs += lhs.batch_axis(axis) == 1 ? 0 : at * left_step;
      product.rhs += rhs.batch_axis(axis) == 1 ? 0 : at * right_step;
      left_step *= lhs.batch_axis(axis);
      right_step *= rhs.batch_axis(axis);
    }
    (*products)[index] = product;
  }
  return ffi::Error::Success();
}

ffi::Error ParseOut(const ffi::AnyBuffer& out, OutType* type) {
  switch (out.element_type()) {
    case ffi::F32:
      *type = kOutFloat32;
      break;
    case ffi::BF16:
      *type = kOutBf16;
      break;
    case ffi::F16:
      *type = kOutF16;
      break;
    default:
      return InvalidArgument(
          "mx_jax matmul: the product must be float32, bfloat16 or float16, got ",
          "another dtype of shape ", Shape(out.dimensions()));
  }
  return ffi::Error::Success();
}

// Packed weights as rhs of `lhs`: `[panels, panel_bytes]`, which stand for `[rows, k]`.
ffi::Error ParseWeights(const ffi::AnyBuffer& weights, std::string_view element,
                        std::string_view scale, int32_t block, int64_t rows, int64_t k,
                        Source* source) {
  const auto* name = std::find(std::begin(kElementNames), std::end(kElementNames), element);
  if (name == std::end(kElementNames) || (scale != "e8m0" && scale != "e4m3")) {
    return InvalidArgument("mx_jax matmul: unknown rhs_element='", element, "' or rhs_scale='",
                           scale, "'");
  }
  Source like{};
  like.element = static_cast<Element>(name - std::begin(kElementNames));
  like.scale_kind = scale == "e8m0" ? kScaleE8M0 : kScaleE4M3;
  like.block = block;
  like.rows = rows;
  like.k = k;
  const WeightSizes sizes = SizesOfWeights(like.element, block, rows, k);
  const int64_t expected[] = {sizes.panels, sizes.panel_bytes};
  if (weights.element_type() != ffi::U8 ||
      !SameShape(weights.dimensions(), ffi::Span<const int64_t>(expected, 2))) {
    return InvalidArgument(
        "mx_jax matmul: packed weights of rows=", rows, ", k=", k, ", block=", block,
        ", rhs_element='", element, "' must be uint8 of shape ",
        Shape(ffi::Span<const int64_t>(expected, 2)), ", got ", Shape(weights.dimensions()));
  }
  *source = PackedSource(like, static_cast<const uint8_t*>(weights.untyped_data()));
  return ffi::Error::Success();
}

ffi::Error CheckBlock(int32_t block) {
  if (block == 16 || block == 32) return ffi::Error::Success();
  return InvalidArgument("mx_jax matmul: block must be 16 or 32, got block=", block);
}

ffi::Error MatmulPacked(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scales,
                        ffi::AnyBuffer weights, ffi::Buffer<ffi::F32> alpha,
                        ffi::Result<ffi::AnyBuffer> out, std::string_view lhs_element,
                        std::string_view rhs_element, std::string_view lhs_scale,
                        std::string_view rhs_scale, int32_t block, bool lhs_k_first) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  const Operand left{"lhs", lhs, lhs_scales, lhs_element, lhs_scale, lhs_k_first};
  MatmulProblem problem{};
  MX_RETURN_IF_ERROR(ParseOperand(left, block, &problem.lhs));
  const auto shape = out->dimensions();
  const auto given = lhs.dimensions();
  bool fits = shape.size() == given.size() && shape[shape.size() - 2] == left.rows();
  int64_t batch = 1;
  for (size_t axis = 0; fits && axis + 2 < shape.size(); ++axis) {
    fits = shape[axis] == given[axis];
    batch *= shape[axis];
  }
  if (!fits || alpha.element_count() != 1) {
    return InvalidArgument("mx_jax matmul: the product of packed weights, ", Shape(shape),
                           ", does not follow from lhs.shape=", Shape(given),
                           ", or alpha is not one factor: alpha.shape=", Shape(alpha.dimensions()));
  }
  MX_RETURN_IF_ERROR(ParseWeights(weights, rhs_element, rhs_scale, block, shape[shape.size() - 1],
                                  left.k(), &problem.rhs));
  MX_RETURN_IF_ERROR(ParseOut(*out, &problem.out_type));
  for (int64_t i = 0; i < batch; ++i) problem.products.push_back({i, 0});
  problem.alpha = alpha.typed_data();
  problem.alpha_step = 0;
  problem.out = out->untyped_data();
  RunMatmul(pool, Pick(kKernels), problem);
  return ffi::Error::Success();
}

ffi::Error PackWeightsOf(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                         ffi::Result<ffi::AnyBuffer> out, std::string_view element,
                         std::string_view scale, int32_t block, bool k_first) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  const Operand operand{"rhs", codes, scales, element, scale, k_first};
  Source source{};
  MX_RETURN_IF_ERROR(ParseOperand(operand, block, &source));
  Source packed{};
  if (operand.rank() != 2 || source.scale_kind == kNoScale) {
    return InvalidArgument("mx_jax pack_weights: needs codes [rows, k], or [k, rows] if k_first, ",
                           "got codes.shape=", Shape(codes.dimensions()), ", element='", element,
                           "'");
  }
  MX_RETURN_IF_ERROR(ParseWeights(*out, element, scale, block, source.rows, source.k, &packed));
  uint8_t* to = static_cast<uint8_t*>(out->untyped_data());
  const MatmulKernels& kernels = Pick(kKernels);
  const WeightSizes sizes = SizesOfWeights(source.element, block, source.rows, source.k);
  ParallelFor(pool, sizes.panels,
              [&](int64_t panel) {
                kernels.pack_codes(source, panel * kTileColumns, to + panel * sizes.panel_bytes);
              });
  return ffi::Error::Success();
}

ffi::Error Matmul(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer lhs_scales,
                  ffi::AnyBuffer rhs, ffi::AnyBuffer rhs_scales, ffi::Buffer<ffi::F32> alpha,
                  ffi::Result<ffi::AnyBuffer> out, std::string_view lhs_element,
                  std::string_view rhs_element, std::string_view lhs_scale,
                  std::string_view rhs_scale, int32_t block, bool lhs_k_first, bool rhs_k_first) {
  MX_RETURN_IF_ERROR(CheckBlock(block));
  const Operand left{"lhs", lhs, lhs_scales, lhs_element, lhs_scale, lhs_k_first};
  const Operand right{"rhs", rhs, rhs_scales, rhs_element, rhs_scale, rhs_k_first};
  MatmulProblem problem{};
  MX_RETURN_IF_ERROR(ParseOperand(left, block, &problem.lhs));
  MX_RETURN_IF_ERROR(ParseOperand(right, block, &problem.rhs));
  if (left.k() != right.k()) {
    return InvalidArgument("mx_jax matmul: both operands must have one k, got lhs.shape=",
                           Shape(lhs.dimensions()), ", rhs.shape=", Shape(rhs.dimensions()),
                           ", lhs_k_first=", lhs_k_first, ", rhs_k_first=", rhs_k_first);
  }
  MX_RETURN_IF_ERROR(FindProducts(left, right, *out, &problem.products));
  const int64_t batch = static_cast<int64_t>(problem.products.size());
  const int64_t num_alpha = static_cast<int64_t>(alpha.element_count());
  if (num_alpha != 1 && num_alpha != batch) {
    return InvalidArgument("mx_jax matmul: alpha must be one factor, or one for each of ", batch,
                           " products, got alpha.shape=", Shape(alpha.dimensions()));
  }
  MX_RETURN_IF_ERROR(ParseOut(*out, &problem.out_type));
  problem.alpha = alpha.typed_data();
  problem.alpha_step = num_alpha == 1 ? 0 : 1;
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
                                  .Attr<bool>("rhs_k_first"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(MxMatmulPacked, mx::MatmulPacked,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("lhs_element")
                                  .Attr<std::string_view>("rhs_element")
                                  .Attr<std::string_view>("lhs_scale")
                                  .Attr<std::string_view>("rhs_scale")
                                  .Attr<int32_t>("block")
                                  .Attr<bool>("lhs_k_first"));

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
