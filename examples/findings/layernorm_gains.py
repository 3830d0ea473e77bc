"""Gains of LayerNorm lie close together, and FLOOR may put a whole block into its last code.

A block whose values all lie between 1.75 and 2 times a power of two has E4M3's largest number below
all of them under FLOOR. Gains of trained norms do that: they change by few per cent. The finding is
from arXiv 2506.20752.

    python examples/findings/layernorm_gains.py
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from findings_figure import parse_no_options, save

import mx_jax

RULES = ("floor", "ceil", "even", "rceil")


def gains(mean: float = 0.95, deviation: float = 0.01, size: int = 4096) -> np.ndarray:
    """Gains near one another, as training leaves them."""
    return np.random.default_rng(0).normal(mean, deviation, size).astype(np.float32)


def measure(x: np.ndarray, rule: str) -> dict[str, float]:
    """Relative error, and the share of values in the largest code, of a scale rule."""
    codes = mx_jax.quantize(jnp.asarray(x), "mxfp8_e4m3", scale_rule=rule)
    values = np.asarray(codes.dequantize())
    error = float(np.linalg.norm(values - x) / np.linalg.norm(x))
    return {"error": error, "last_code": float(np.mean(np.asarray(codes.codes) == 0x7E))}


def draw(axes: Any) -> None:
    means = np.linspace(0.5, 1.0, 51, endpoint=False)
    for rule in RULES:
        errors = [100 * measure(gains(mean, size=256), rule)["error"] for mean in means]
        axes.plot(means, errors, label=rule.upper())
    axes.set(xlabel="mean of the gains", ylabel="relative error (%)")
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    for rule in RULES:
        print(rule, measure(gains(), rule))
    save("layernorm_gains", draw)
