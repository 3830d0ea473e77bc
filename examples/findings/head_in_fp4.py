"""Why the head stays in high precision: four bits flush most values of the logits' gradient.

The gradient of cross-entropy is `softmax - onehot`: in each row one value near -1, and a small
positive one for each other token. In a block with the large value, E2M1 keeps nothing below a
twenty-fourth of its scale's largest number: small values vanish, all in the same direction.

    python examples/findings/head_in_fp4.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax

FORMATS = {"mxfp8_e4m3": "rceil", "mxfp6_e2m3": "even", "mxfp4": "even"}


def gradient(temperature: float, rows: int = 512, vocabulary: int = 96) -> jax.Array:
    """Of the logits: of a model that knows more, the larger they are."""
    logits = temperature * jax.random.normal(jax.random.key(0), (rows, vocabulary))
    targets = jax.random.categorical(jax.random.key(1), logits)
    return jax.nn.softmax(logits) - jax.nn.one_hot(targets, vocabulary)


def kept(format: str, temperature: float = 2.0) -> float:
    """The share of all positive gradients that is left after the cast, by their sum."""
    g = gradient(temperature)
    q = mx_jax.cast(g, format, scale_rule=FORMATS[format])
    return float(jnp.where(g > 0, q, 0).sum() / jnp.where(g > 0, g, 0).sum())


def vanished(format: str, temperature: float = 2.0) -> float:
    """The share of values that become zero."""
    g = gradient(temperature)
    return float((mx_jax.cast(g, format, scale_rule=FORMATS[format]) == 0).mean())


def draw(axes: Any) -> None:
    temperatures = np.linspace(0, 4, 21)
    for format in FORMATS:
        shares = [100 * kept(format, float(temperature)) for temperature in temperatures]
        axes.plot(temperatures, shares, label=format)
    axes.set(
        xlabel="deviation of the logits", ylabel="sum of small gradients kept (%)", ylim=(0, None)
    )
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    for format in FORMATS:
        print(format, kept(format), vanished(format))
    save("head_in_fp4", draw)
