"""torchao's named float8 recipes: one float32 scale a tensor or a row, no MX blocks."""

import dataclasses

from mx_jax.formats import E4M3
from mx_jax.recipes.base import Recipe
from mx_jax.recipes.float8_config import AXISWISE, DISABLED, Cast, Float8Config


def float8_tensorwise() -> Recipe:
    """One scale a tensor: E4M3 input and weight, E5M2 gradients, in all three products.

    Source: torchao.float8, recipe "tensorwise".

    Examples:
      >>> from mx_jax import recipes
      >>> recipe = recipes.float8_tensorwise()
      >>> recipe.fwd.lhs.format.name, recipe.dlhs.lhs.format.name
      ('float8_tensorwise_e4m3', 'float8_tensorwise_e5m2')
    """
    return Float8Config().recipe("float8_tensorwise")


def float8_rowwise() -> Recipe:
    """One power-of-two scale a row or column: E4M3 everywhere, in all three products.

    Source: torchao.float8, recipe "rowwise".

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> spec = mx_jax.recipes.float8_rowwise().fwd.lhs
      >>> mx_jax.quantize(jnp.full((2, 64), 3.0), spec.format, scale_rule=spec.scale_rule).scales
      Array([[128.],
             [128.]], dtype=float32)
    """
    return Float8Config(
        cast_config_input=AXISWISE,
        cast_config_weight=AXISWISE,
        cast_config_grad_output=dataclasses.replace(AXISWISE, element=E4M3),
        round_scales_to_power_of_2=True,
    ).recipe("float8_rowwise")


def float8_rowwise_with_gw_hp() -> Recipe:
    """Row-wise, with the weight gradient in high precision.

    Output: input and weight row-wise; grad_input: gradient row-wise, weight tensor-wise;
    grad_weight: high precision. E4M3 and power-of-two scales everywhere.
    Source: torchao.float8, recipe "rowwise_with_gw_hp".

    Examples:
      >>> from mx_jax import recipes
      >>> print(recipes.float8_rowwise_with_gw_hp().drhs)
      high precision x high precision
    """
    return Float8Config(
        cast_config_input=AXISWISE,
        cast_config_weight=AXISWISE,
        cast_config_grad_output=dataclasses.replace(AXISWISE, element=E4M3),
        cast_config_input_for_grad_weight=DISABLED,
        cast_config_weight_for_grad_input=Cast(),
        cast_config_grad_output_for_grad_weight=dataclasses.replace(DISABLED, element=E4M3),
        round_scales_to_power_of_2=True,
    ).recipe("float8_rowwise_with_gw_hp")
