"""E5M2 for gradients? With a scale for each 32 values E4M3 is better, until values spread very far.

A gradient has a wide range over a whole tensor, but a block has a scale of its own. So an exponent
bit more is of use only where values of one block differ by more than E4M3's range.

    python examples/findings/gradients_e4m3_e5m2.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2")


def spread(octaves: float, size: int = 65536) -> jax.Array:
    """Normal values times powers of two, whose exponents have this standard deviation."""
    signs, exponents = jax.random.normal(jax.random.key(0), (2, size))
    return signs * 2.0 ** (octaves * exponents)


def relative_error(octaves: float, format: str) -> float:
    """Median relative error of single values: every value counts alike, small ones too."""
    x = spread(octaves)
    q = mx_jax.cast(x, format, scale_rule="rceil")
    return float(jnp.median(jnp.abs(q - x) / jnp.abs(x)))


def sqnr(octaves: float, format: str) -> float:
    """In dB: large values count most, as they do in a product."""
    x = spread(octaves)
    return mx_jax.inspect.sqnr_db(x, mx_jax.cast(x, format, scale_rule="rceil"))


def draw(axes: Any) -> None:
    octaves = np.linspace(0, 12, 25)
    for format in FORMATS:
        errors = [100 * relative_error(float(octave), format) for octave in octaves]
        axes.plot(octaves, errors, label=format)
    axes.set(
        xlabel="spread of values (standard deviation of their exponents)",
        ylabel="median relative error (%)",
    )
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    for octaves in (0.0, 4.0, 8.0, 12.0):
        for format in FORMATS:
            print(octaves, format, relative_error(octaves, format), sqnr(octaves, format))
    save("gradients_e4m3_e5m2", draw)
