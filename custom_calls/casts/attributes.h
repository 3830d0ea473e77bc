// Attributes of handlers, as Python passes them, checked and parsed.
#ifndef MX_JAX_CUSTOM_CALLS_CASTS_ATTRIBUTES_H_
#define MX_JAX_CUSTOM_CALLS_CASTS_ATTRIBUTES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "casts/geometry.h"
#include "casts/quantize.h"
#include "common/checks.h"
#include "common/element_codec.h"
#include "common/scale_codec.h"
#include "xla/ffi/api/ffi.h"

namespace mx {

template <class T>
xla::ffi::Error ReadAttribute(const char* operation, const xla::ffi::Dictionary& all,
                              const std::string& name, T* value) {
  auto attribute = all.get<T>(name);
  if (attribute.has_error()) {
    return InvalidArgument("mx_jax ", operation, ": attribute ", name, ": ",
                           attribute.error().message());
  }
  *value = *attribute;
  return xla::ffi::Error::Success();
}

// The facts of an element format, in the order of `ElementFacts`.
inline xla::ffi::Error ParseElement(const char* operation, const char* name,
                                    xla::ffi::Span<const int32_t> numbers, ElementFormat* element) {
  ElementFacts facts{};
  if (numbers.size() == kNumElementFacts) {
    facts = {numbers[0], numbers[1], numbers[2], numbers[3],
             numbers[4], numbers[5], numbers[6], numbers[7]};
  }
  if (numbers.size() != kNumElementFacts || !IsElement(facts)) {
    return InvalidArgument("mx_jax ", operation, ": ", name, " must be the ", kNumElementFacts,
                           " facts of a format of at most 8 bits, got ", name, "=", Shape(numbers));
  }
  *element = Derive(facts);
  return xla::ffi::Error::Success();
}

// As Rounding has them.
constexpr const char* kRoundingNames[] = {"nearest", "away", "toward_zero", "stochastic"};

inline xla::ffi::Error ParseRounding(std::string_view name, int32_t num_bits, Rounding* rounding) {
  if (!FindName(kRoundingNames, name, rounding)) {
    return InvalidArgument("mx_jax quantize: unknown rounding='", name, "'");
  }
  const bool stochastic = *rounding == Rounding::kStochastic;
  if (stochastic ? num_bits < 1 || num_bits > 17 : num_bits != 0) {
    return InvalidArgument("mx_jax quantize: random_bits must be 1..17 for stochastic rounding and ",
                           "0 for others, got random_bits=", num_bits, ", rounding='", name, "'");
  }
  return xla::ffi::Error::Success();
}

// rule: "exponent" (E8M0, with a threshold), "amax", "amax_becomes" (a scale in scale_element; of
// the second amax becomes the target), "float8", "float8_power_of_two", "amax_divisor" or
// "amax_multiplier" (float32 scales).
inline xla::ffi::Error ParseRule(std::string_view name, int32_t threshold, float target,
                                 xla::ffi::Span<const int32_t> scale_element,
                                 const ElementFormat& element, ScaleRule* rule) {
  *rule = ScaleRule{};
  rule->emax = element.emax;
  rule->target = MaxOf(element);
  if (name == "exponent") {
    rule->kind = ScaleFormatKind::kExponent;
    rule->threshold = threshold;
    if (threshold < 1 || threshold > 1 << 23 || element.emax < 0) {
      return InvalidArgument("mx_jax quantize: an exponent scale needs 1 <= threshold <= 2^23 and ",
                             "emax >= 0, got threshold=", threshold, ", emax=", element.emax);
    }
    return xla::ffi::Error::Success();
  }
  if (name == "amax" || name == "amax_becomes") {
    rule->kind = ScaleFormatKind::kElement;
    MX_RETURN_IF_ERROR(
        ParseElement("quantize", "scale_element", scale_element, &rule->scale_element));
    if (rule->scale_element.nan_code < 0) {
      return InvalidArgument("mx_jax quantize: scale_element must have a NaN, got scale_element=",
                             Shape(scale_element));
    }
    rule->smallest = name == "amax" ? SmallestNormal(rule->scale_element)
                                    : SmallestSubnormal(rule->scale_element);
    if (name == "amax_becomes") {
      if (!(target > 0.0f)) {
        return InvalidArgument("mx_jax quantize: target must be above 0, got target=", target);
      }
      rule->target = target;
    }
    return xla::ffi::Error::Success();
  }
  if (name == "float8" || name == "float8_power_of_two" || name == "amax_divisor") {
    rule->kind = ScaleFormatKind::kDivisor;
    rule->power_of_two = name == "float8_power_of_two";
    // torchao's guard against division by zero, and one that only keeps subnormals away.
    const double smallest = name == "amax_divisor" ? 0x1p-100 : 1e-12;
    rule->smallest = static_cast<float>(smallest);
    rule->scale_of_tiny = static_cast<float>(static_cast<double>(rule->target) / smallest);
    return xla::ffi::Error::Success();
  }
  if (name == "amax_multiplier") {
    rule->kind = ScaleFormatKind::kMultiplier;
    return xla::ffi::Error::Success();
  }
  return InvalidArgument("mx_jax quantize: unknown rule='", name, "'");
}

// What a cast is told besides shapes, dtypes and blocks: mx_jax.backends.cpu_ffi.casts.
struct CastAttributes {
  xla::ffi::Span<const int32_t> element;
  std::string_view rounding;
  int32_t random_bits;
  xla::ffi::Span<const int64_t> derivations;  // of the keys that they are drawn by
  std::string_view rule;
  xla::ffi::Span<const int32_t> scale_element;
  int32_t threshold;
  float target;
  bool has_tensor_scale;
  float largest_value;  // of a tensor over the tensor scale that is to be found; 0: none is
};

inline xla::ffi::Error ParseCast(const CastAttributes& attributes, QuantizePlan* plan) {
  MX_RETURN_IF_ERROR(ParseElement("quantize", "element", attributes.element, &plan->element));
  MX_RETURN_IF_ERROR(
      ParseRounding(attributes.rounding, attributes.random_bits, &plan->rounding));
  plan->num_random_bits = attributes.random_bits;
  return ParseRule(attributes.rule, attributes.threshold, attributes.target,
                   attributes.scale_element, plan->element, &plan->rule);
}

// What scales mean, as ScaleFormatKind has it: mx_jax.formats.ScaleFormat.kind.
constexpr const char* kScaleKindNames[] = {"exponent", "element", "divisor", "multiplier"};

// Operand `index` of `rest`: float32, one number for each of equal parts of the slices.
inline xla::ffi::Error TakeTensorScale(const char* operation, const xla::ffi::RemainingArgs& rest,
                                       size_t index, int64_t outer, const float** scales,
                                       int64_t* count) {
  auto scale = rest.get<xla::ffi::AnyBuffer>(index);
  if (scale.has_error()) return scale.error();
  *count = static_cast<int64_t>(scale->element_count());
  if (scale->element_type() != xla::ffi::F32 || (outer != 0 && *count < 1) ||
      (*count != 0 && outer % *count != 0)) {
    return InvalidArgument("mx_jax ", operation, ": tensor_scale must be float32, one for each of ",
                           "equal parts of ", outer, " slices, got tensor_scale.shape=",
                           Shape(scale->dimensions()));
  }
  *scales = static_cast<const float*>(scale->untyped_data());
  return xla::ffi::Error::Success();
}

}  // namespace mx

#endif  // MX_JAX_CUSTOM_CALLS_CASTS_ATTRIBUTES_H_
