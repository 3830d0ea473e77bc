"""Rotary position embedding, feature i of a head turned with feature i + half."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.generate.config import LlamaConfig
from mx_jax.generate.fields import Fields

Turn = tuple[jax.Array, jax.Array]


def rotations(config: LlamaConfig, tokens: int, position: jax.typing.ArrayLike) -> Turn:
    """Cosines and sines, float32 `[tokens, 1, head_width]`, of `position`, `position + 1`, ...

    The angle of pair i is `position * theta^(-2i / head_width) / divisor_i`.
    """
    half = jnp.arange(config.head_width // 2, dtype=jnp.float32)
    frequencies = config.rope_theta ** (-2 * half / config.head_width)
    if config.rope_divisors is not None:
        frequencies = frequencies / jnp.array(config.rope_divisors, jnp.float32)
    places = (position + jnp.arange(tokens)).astype(jnp.float32)
    angles = jnp.tile(places[:, None, None] * frequencies, 2)
    return jnp.cos(angles), jnp.sin(angles)


def _linear(said: Fields, theta: float, head_width: int) -> tuple[float, ...]:
    """All frequencies lower by one factor."""
    return (said.number("factor"),) * (head_width // 2)


def _llama3(said: Fields, theta: float, head_width: int) -> tuple[float, ...]:
    """Frequencies whose waves are long lower by a factor, short ones as they are."""
    factor, low, high = (
        said.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = said.number("original_max_position_embeddings")

    def divisor(pair: int) -> float:
        wavelength = 2 * math.pi * theta ** (2 * pair / head_width)
        # 0 for waves that fit in the original context `low` times, 1 for `high` times.
        share = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - share) / factor + share)

    return tuple(divisor(pair) for pair in range(head_width // 2))


# Ways in which a model reaches beyond its first context, by the hub's names.
_SCALINGS: dict[str, Callable[[Fields, float, int], tuple[float, ...] | None]] = {
    "default": lambda said, theta, head_width: None,
    "linear": _linear,
    "llama3": _llama3,
}


def rope_divisors(
    said: Mapping[str, Any], theta: float, head_width: int, where: str = "config.json"
) -> tuple[float, ...] | None:
    """What each pair's frequency is divided by.

    Args:
      said: `rope_scaling` or `rope_parameters` of a config.json.
      theta: base of the wavelengths.
      head_width: features of a head.
      where: the path of the file that says it, for errors.

    Returns:
      A number for each pair; None: nothing is divided.

    Raises:
      ValueError: a way that is not known, or one whose numbers are missing or make no sense.
    """
    kind = said.get("rope_type", said.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ValueError(
            f"generate: {where}: knows the rotary embeddings {', '.join(_SCALINGS)}, got "
            f"rope_type={kind!r}"
        )
    try:
        divisors = _SCALINGS[kind](Fields(said, f"{where}, rope_type={kind!r}"), theta, head_width)
    except ZeroDivisionError:
        divisors = (0.0,)
    if divisors is not None and not all(each > 0 for each in divisors):
        raise ValueError(
            f"generate: {where}: numbers of rope_type={kind!r} divide by zero, got {dict(said)}"
        )
    return divisors


def rotate(x: jax.Array, turn: Turn) -> jax.Array:
    """Turn heads `[..., tokens, heads, head_width]`, in float32, to x's dtype."""
    cosines, sines = turn
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = x * cosines + jnp.concatenate([-second, first], -1) * sines
    return turned.astype(x.dtype)
