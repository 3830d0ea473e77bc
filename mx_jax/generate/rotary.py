"""Rotary position embedding, feature i of a head turned with feature i + half."""

import jax
import jax.numpy as jnp

from mx_jax.generate.config import LlamaConfig

Turn = tuple[jax.Array, jax.Array]


def rotations(config: LlamaConfig, tokens: int, position: jax.typing.ArrayLike) -> Turn:
    """Cosines and sines, float32 `[tokens, 1, head_width]`, of `position`, `position + 1`, ...

    The angle of pair i is `position * theta^(-2i / head_width)`.
    """
    half = jnp.arange(config.head_width // 2, dtype=jnp.float32)
    wavelengths = config.rope_theta ** (-2 * half / config.head_width)
    places = (position + jnp.arange(tokens)).astype(jnp.float32)
    angles = jnp.tile(places[:, None, None] * wavelengths, 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, turn: Turn) -> jax.Array:
    """Turn heads `[..., tokens, heads, head_width]`, in float32, to x's dtype."""
    cosines, sines = turn
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = x * cosines + jnp.concatenate([-second, first], -1) * sines
    return turned.astype(x.dtype)
