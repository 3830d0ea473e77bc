// What the arguments of a product's handler mean, and whether they fit together.
#ifndef MX_JAX_CUSTOM_CALLS_PRODUCTS_OPERANDS_H_
#define MX_JAX_CUSTOM_CALLS_PRODUCTS_OPERANDS_H_

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/checks.h"
#include "products/problem.h"
#include "products/weights.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

namespace ffi = xla::ffi;

constexpr const char* kElementNames[] = {"e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8"};

// One operand as it came: `[*batch, rows, k]`, or `[*batch, k, rows]` if k_first.
struct Operand {
  const char* side;
  ffi::AnyBuffer elements, scales;
  std::string_view element, scale;
  bool k_first;

  int64_t rank() const { return static_cast<int64_t>(elements.dimensions().size()); }
  int64_t rows() const { return elements.dimensions()[rank() - (k_first ? 1 : 2)]; }
  int64_t k() const { return elements.dimensions()[rank() - (k_first ? 2 : 1)]; }
};

inline ffi::Error ParseHighPrecision(const Operand& operand, Source* source) {
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

inline ffi::Error ParseCodes(const Operand& operand, Source* source) {
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

inline ffi::Error ParseOperand(const Operand& operand, int32_t block, Source* source) {
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

using Dimensions = ffi::Span<const int64_t>;

// Which product of each operand every product of the batch takes: axes of one are repeated. Both
// operands have two more axes than their batch.
inline bool FindProducts(Dimensions lhs, int64_t lhs_rows, Dimensions rhs, int64_t rhs_rows,
                         Dimensions out, std::vector<Product>* products) {
  const int64_t rank = static_cast<int64_t>(out.size());
  if (rank < 2 || lhs.size() != out.size() || rhs.size() != out.size()) return false;
  if (out[rank - 2] != lhs_rows || out[rank - 1] != rhs_rows) return false;
  int64_t batch = 1;
  for (int64_t axis = 0; axis < rank - 2; ++axis) {
    if (lhs[axis] != out[axis] && lhs[axis] != 1) return false;
    if (rhs[axis] != out[axis] && rhs[axis] != 1) return false;
    batch *= out[axis];
  }
  products->resize(batch);
  for (int64_t index = 0; index < batch; ++index) {
    Product product{0, 0};
    int64_t rest = index, left_step = 1, right_step = 1;
    for (int64_t axis = rank - 3; axis >= 0; --axis) {
      const int64_t at = rest % out[axis];
      rest /= out[axis];
      product.lhs += lhs[axis] == 1 ? 0 : at * left_step;
      product.rhs += rhs[axis] == 1 ? 0 : at * right_step;
      left_step *= lhs[axis];
      right_step *= rhs[axis];
    }
    (*products)[index] = product;
  }
  return true;
}

inline ffi::Error ParseOut(const ffi::AnyBuffer& out, OutType* type) {
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

// Packed weights as rhs: `[*batch, panels, panel_bytes]`, which stand for `[*batch, rows, k]`.
inline ffi::Error ParseWeights(const ffi::AnyBuffer& weights, std::string_view element,
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

// The factors of a problem whose products are known.
inline ffi::Error ParseAlpha(const ffi::Buffer<ffi::F32>& alpha, MatmulProblem* problem) {
  const int64_t batch = static_cast<int64_t>(problem->products.size());
  const int64_t count = static_cast<int64_t>(alpha.element_count());
  if (count != 1 && count != batch) {
    return InvalidArgument("mx_jax matmul: alpha must be one factor, or one for each of ", batch,
                           " products, got alpha.shape=", Shape(alpha.dimensions()));
  }
  problem->alpha = alpha.typed_data();
  problem->alpha_step = count == 1 ? 0 : 1;
  return ffi::Error::Success();
}

inline ffi::Error CheckBlock(int32_t block) {
  if (block == 16 || block == 32) return ffi::Error::Success();
  return InvalidArgument("mx_jax matmul: block must be 16 or 32, got block=", block);
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_PRODUCTS_OPERANDS_H_
