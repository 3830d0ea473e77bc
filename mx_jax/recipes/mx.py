"""Named MX and NVFP4 recipes, and the two that cast in the forward product alone.

Scale rules by measurement: see `measured.py`.
"""

from typing import Any

from mx_jax.formats import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
    block_format,
)
from mx_jax.recipes.base import Recipe
from mx_jax.recipes.measured import measured_operand
from mx_jax.reference.scale_rules import RCEIL, ScaleRule
from mx_jax.specs import MatmulSpec, OperandSpec, Residuals, operand


def _recipe(name: str, forward: OperandSpec, gradient: OperandSpec) -> Recipe:
    """One format for activations and weights, one for gradients, all three products quantized."""
    backward = MatmulSpec(lhs=gradient, rhs=forward)
    return Recipe(
        name=name,
        fwd=MatmulSpec(lhs=forward, rhs=forward),
        dlhs=backward,
        drhs=backward,
        residuals=Residuals.PRIMAL,
    )


def _uniform(name: str, format: BlockFormat) -> Recipe:
    return _recipe(name, measured_operand(format), measured_operand(format))


def mxfp8() -> Recipe:
    """MXFP8 training: E4M3 for activations, weights and gradients, RCEIL scales.

    Source: Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> print(mx_jax.recipes.mxfp8().dlhs)
      mxfp8_e4m3 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
      >>> loss = lambda w: mx_jax.matmul(jnp.ones((4, 64)), w, recipe="mxfp8").sum()
      >>> jax.grad(loss)(jnp.ones((64, 8))).shape
      (64, 8)
    """
    return _uniform("mxfp8", MXFP8_E4M3)


def mxfp8_hybrid() -> Recipe:
    """MXFP8 training with E5M2 gradients: E4M3 for activations and weights, RCEIL scales.

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.mxfp8_hybrid().dlhs)
      mxfp8_e5m2 (rceil, nearest) x mxfp8_e4m3 (rceil, nearest)
    """
    return _recipe("mxfp8_hybrid", measured_operand(MXFP8_E4M3), measured_operand(MXFP8_E5M2))


def mxfp6() -> Recipe:
    """MXFP6 training: E3M2 everywhere, EVEN scales.

    Source: Rouhani et al., arXiv 2310.10537, whose scales are FLOOR's and whose ties round away
    from zero: `mxfp6().with_(scale_rule="floor", rounding="away")`. EVEN clips less.

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.mxfp6().with_(scale_rule="floor", rounding="away").fwd.lhs)
      mxfp6_e3m2 (floor, away)
    """
    return _uniform("mxfp6", MXFP6_E3M2)


def mxfp6_e2m3() -> Recipe:
    """MXFP6 training: E2M3 everywhere, EVEN scales.

    A mantissa bit more than `mxfp6` and an exponent bit less, which a block's shared scale makes up
    for: 28 dB a product on normal data, where `mxfp6` has 22.6 and `mxfp8` 28.5.

    Examples:
      >>> from mx_jax import recipes
      >>> for recipe in (recipes.mxfp6(), recipes.mxfp6_e2m3()):
      ...     element = recipe.fwd.lhs.format.element
      ...     print(element.name, element.mantissa_bits, element.smallest_subnormal, element.max)
      e3m2 2 0.0625 28.0
      e2m3 3 0.125 7.5
    """
    return _uniform("mxfp6_e2m3", MXFP6_E2M3)


def mxfp4() -> Recipe:
    """Plain MXFP4 training: E2M1 everywhere, EVEN scales, nearest rounding.

    Examples:
      >>> from mx_jax import recipes
      >>> gentle = recipes.mxfp4().with_(gradients="mxfp8_e5m2")
      >>> print(gentle.fwd.lhs, "|", gentle.dlhs.lhs)
      mxfp4 (even, nearest) | mxfp8_e5m2 (rceil, nearest)
    """
    return _uniform("mxfp4", MXFP4)


def mxint8() -> Recipe:
    """MXINT8 training: INT8 everywhere, FLOOR scales (MX v1.0, section 5.3.4).

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> print(mx_jax.recipes.mxint8().fwd.lhs)
      mxint8 (floor, nearest)
      >>> mx_jax.quantize(jnp.array([1.0, 0.5, -0.25]), "mxint8").elements
      Array([ 64,  32, -16], dtype=int8)
    """
    return _uniform("mxint8", MXINT8)


def nvfp4() -> Recipe:
    """Plain NVFP4 training: E2M1 in blocks of 16, E4M3 scales, a float32 scale a tensor.

    Examples:
      >>> from mx_jax import recipes
      >>> format = recipes.nvfp4().fwd.lhs.format
      >>> format.block, format.scale.name, format.tensor_scale
      ((1, 16), 'e4m3', True)
    """
    return _uniform("nvfp4", NVFP4)


def weight_only(format: Any, scale_rule: ScaleRule | str | None = None) -> Recipe:
    """Only the right operand (the weight) of the product itself is quantized.

    Activations and both gradient products stay in high precision: for inference, and for
    quantization-aware fine-tuning of weights. `grad_input = g Q(rhs)^T` multiplies the very weight
    that the product multiplied, as the function that ran has it; `grad_weight = lhs^T g` passes
    straight through to the weight, as if its cast were the identity. A weight that is stored, as
    `MXArray` or packed, has no gradient: `mx_jax.nn.split_stored` parts it from what is trained.

    Args:
      format: block format of the weight, as an object, name or dtype.
      scale_rule: rule or name; None: the one that loses least for the format.

    Raises:
      ValueError: unknown names, or a rule that does not fit the format.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> print(recipe.fwd)
      high precision x mxfp4 (even, nearest)
      >>> y = mx_jax.matmul(jnp.full((4, 64), 0.1), jnp.full((64, 8), 5.1), recipe=recipe)
      >>> print(f"{y[0, 0] / 64 / 0.1:.1f}")
      6.0
    """
    spec = measured_operand(format)
    if scale_rule is not None:
        spec = operand(format, scale_rule=scale_rule)
    high = MatmulSpec(lhs=None, rhs=None)
    return Recipe(
        name=f"weight_only({spec.format.name})",
        fwd=MatmulSpec(lhs=None, rhs=spec),
        dlhs=high,
        drhs=high,
        residuals=Residuals.QUANTIZED,
    )


def qat(format: Any, scale_rule: ScaleRule | str | None = None) -> Recipe:
    """Quantization-aware training: quantized forward, high-precision backward.

    The backward products multiply by the very values that the forward product used, dequantized:
    the exact gradient of the quantized function, with each rounding taken as the identity. Quantize
    the trained weights by the same rule, e.g. `weight_only(format, scale_rule)`.

    Args:
      format: block format of both operands, as an object, name or dtype.
      scale_rule: rule or name; None: torchao's default, RCEIL where scales are powers of two.

    Raises:
      ValueError: unknown names, a dtype that is ambiguous, or a rule that does not fit the format.

    Source: torchao's `MXFakeQuantizedLinear` and `NVFP4FakeQuantizedLinear`.

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.qat("mxfp4")
      >>> print(recipe.fwd)
      mxfp4 (rceil, nearest) x mxfp4 (rceil, nearest)
      >>> print(recipe.drhs, "|", recipe.residuals.value)
      high precision x high precision | quantized
    """
    format = block_format(format)
    if scale_rule is None and format.scale.kind in RCEIL.kinds:
        scale_rule = RCEIL
    spec = operand(format, scale_rule=scale_rule)
    high = MatmulSpec(lhs=None, rhs=None)
    return Recipe(
        name=f"qat({spec.format.name})",
        fwd=MatmulSpec(lhs=spec, rhs=spec),
        dlhs=high,
        drhs=high,
        residuals=Residuals.QUANTIZED,
    )


def high_precision() -> Recipe:
    """Nothing is quantized: `jax.lax.dot_general` itself, gradients included.

    Examples:
      >>> from mx_jax import recipes
      >>> schedule = recipes.Schedule([(0, "mxfp4"), (900, recipes.high_precision())])
      >>> schedule.at(899).is_high_precision, schedule.at(900).is_high_precision
      (False, True)
    """
    high = MatmulSpec(lhs=None, rhs=None)
    return Recipe(name="high_precision", fwd=high, dlhs=high, drhs=high, residuals=Residuals.PRIMAL)
