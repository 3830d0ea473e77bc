"""A scale rule that no threshold of amax describes: of two exponents, that which loses less."""

import jax
import jax.numpy as jnp

from mx_jax.reference.scale_rules import FLOOR, BlockData, ScaleRule, squared_error


def least_error(data: BlockData) -> jax.Array:
    """FLOOR's E8M0 scale, or the next one up where the block's squared error is smaller so."""
    low = FLOOR.scales(data)
    high = jnp.where(low < 254, low + 1, low)  # 254 is the largest scale, 255 a block of NaN
    return jnp.where(squared_error(data, high) < squared_error(data, low), high, low)


LEAST_ERROR = ScaleRule(name="least_error", kinds=("exponent",), scales=least_error)
