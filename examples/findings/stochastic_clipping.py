"""Stochastic rounding is right on average, except for what its scale rule clips.

FLOOR leaves E2M1 no number above 6 for blocks whose largest value is up to 8 times their scale:
what lies between 6 and 8 is clipped, always downwards. Multiplying by 3/4 before the cast, and by
4/3 after it, makes room (arXiv 2502.20586); so does RCEIL, which never clips,
with less noise.

    python examples/findings/stochastic_clipping.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax

WAYS = ("FLOOR", "FLOOR, 3/4", "RCEIL")


def cast(x: jax.Array, way: str, key: jax.Array) -> jax.Array:
    """Blocks `[n, 32]` stochastically to MXFP4, one of the ways."""
    if way == "FLOOR, 3/4":
        return three_quarters(x, key)
    options = {"scale_rule": way.lower(), "rounding": "stochastic", "key": key}
    return mx_jax.cast(x, "mxfp4", **options)


def three_quarters(x: jax.Array, key: jax.Array) -> jax.Array:
    """With FLOOR's scale of x itself, by which 3/4 of x is at most 6."""
    scale = 2.0 ** (mx_jax.quantize(x, "mxfp4").scales.astype(jnp.float32) - 127)
    y = 0.75 * x / scale
    # A 4 in each block gives it the scale 1, whatever else is in it.
    y = jnp.concatenate([y, jnp.full_like(y[:, :1], 4.0)], axis=1)
    options = {"scale_rule": "floor", "rounding": "stochastic", "key": key}
    return mx_jax.cast(y, "mxfp4", block_size=33, **options)[:, :-1] * scale / 0.75


def measure(way: str) -> dict[str, float]:
    """Slope `<Q(x), x> / <x, x>` and SQNR on normal data."""
    x = jax.random.normal(jax.random.key(0), (8192, 32))
    q = cast(x, way, jax.random.key(1))
    return {
        "slope": float(jnp.vdot(q, x) / jnp.vdot(x, x)),
        "sqnr_db": mx_jax.inspect.sqnr_db(x, q),
    }


def mean_of_largest(way: str, largest: float, draws: int = 4096) -> float:
    """Mean of what becomes of the largest value of a block, relative to it."""
    block = jnp.zeros((draws, 32)).at[:, 0].set(largest)
    return float(cast(block, way, jax.random.key(2))[:, 0].mean() / largest)


def draw(axes: Any) -> None:
    sizes = np.linspace(4, 8, 41, endpoint=False)
    for way in WAYS:
        means = [100 * (mean_of_largest(way, float(size)) - 1) for size in sizes]
        axes.plot(sizes, means, label=way)
    axes.set(xlabel="largest value of a block", ylabel="its bias after the cast (%)")
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    for way in WAYS:
        print(way, measure(way))
    save("stochastic_clipping", draw)
