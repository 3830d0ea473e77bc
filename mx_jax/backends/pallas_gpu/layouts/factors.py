"""Tensor scales as kernels take them: two numbers for each product, one after the other."""

import jax
import jax.numpy as jnp


def factors_of(scales: tuple[jax.Array | None, ...], count: int) -> jax.Array | None:
    """float32 `[len(scales) * count]`, or None if there are no scales.

    Args:
      scales: one number, or one for each product; None counts as ones.
      count: of products, or of groups.
    """
    if all(scale is None for scale in scales):
        return None
    ones = jnp.ones(count, jnp.float32)
    return jnp.concatenate(
        [ones if scale is None else ones * scale.reshape(-1) for scale in scales]
    )
