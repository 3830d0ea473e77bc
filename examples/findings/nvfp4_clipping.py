"""NVFP4 rounds its scales to nearest, so about half of all blocks clip their largest value.

A scale is amax / 6 in E4M3. Where it is rounded down, 6 times the scale lies below amax, by up to
a sixteenth. Nearest rounding of the elements hardly notices; stochastic rounding is no longer right
on average. The rule `amax_headroom` makes scales 17/16 as large, and nothing is clipped.

    python examples/findings/nvfp4_clipping.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax


def blocks(number: int = 16384) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (number, 16))


def room(x: jax.Array) -> np.ndarray:
    """Six scales over amax, for each block: below 1 the largest value is clipped."""
    q = mx_jax.quantize(x, "nvfp4")
    assert q.tensor_scale is not None
    # The scales are E4M3's codes.
    scales = jnp.asarray(q.scales).view(jnp.float8_e4m3fn).astype(jnp.float32) * q.tensor_scale
    return np.asarray(6 * scales[:, 0] / jnp.abs(x).max(axis=1))


def slope(x: jax.Array, rule: str, draws: int = 16) -> float:
    """`<Q(x), x> / <x, x>` of stochastic rounding, the mean of some draws."""

    @jax.jit
    def of(x: jax.Array, key: jax.Array) -> jax.Array:
        q = mx_jax.cast(x, "nvfp4", rounding="stochastic", key=key, scale_rule=rule)
        return jnp.vdot(q, x) / jnp.vdot(x, x)

    return float(np.mean([of(x, key) for key in jax.random.split(jax.random.key(1), draws)]))


def measure() -> dict[str, float]:
    """The share of blocks that are clipped, and slopes without and with headroom."""
    x = blocks()
    clipped = float(np.mean(room(x) < 1))
    return {"clipped": clipped, **{rule: slope(x, rule) for rule in ("amax", "amax_headroom")}}


def draw(axes: Any) -> None:
    rooms = room(blocks())
    axes.hist(rooms[rooms < 1], bins=np.linspace(0.93, 1, 36), label="clipped")
    axes.hist(rooms[rooms >= 1], bins=np.linspace(1, 1.07, 36), label="not")
    axes.set(xlabel="6 x scale / largest value of the block", ylabel="blocks")
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    print(measure())
    save("nvfp4_clipping", draw)
