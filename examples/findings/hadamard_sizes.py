"""A Hadamard transform spreads outliers over its groups; without outliers it brings nothing.

Both operands of a product are transformed before they are quantized, and the transforms cancel in
the product. Groups as large as the blocks do best; larger ones bring no more here.

    python examples/findings/hadamard_sizes.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from findings_figure import parse_no_options, save

import mx_jax
from mx_jax.recipes import Hadamard, MatmulSpec, operand

SIZES = (0, 16, 32, 64, 128)
K = 512


def operands(outlier: float) -> tuple[jax.Array, jax.Array]:
    """Normal data, in which each 128th feature of the left operand is larger."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (256, K)), jax.random.normal(keys[1], (K, 64))
    return x * jnp.where(jnp.arange(K) % 128 == 7, outlier, 1.0), w


def sqnr(size: int, outlier: float) -> float:
    """Of an MXFP4 product, in dB; size 0: without a transform."""
    x, w = operands(outlier)
    spec = operand("mxfp4", scale_rule="even")
    transform = Hadamard(size=size, signs=None) if size else None
    plain = mx_jax.recipes.mxfp4()
    recipe = dataclasses.replace(
        plain, name="forward", output=MatmulSpec(lhs=spec, rhs=spec, transform=transform)
    )
    key = jax.random.key(1) if recipe.is_stochastic else None
    with jax.default_matmul_precision("float32"):
        exact = x @ w
    return mx_jax.inspect.sqnr_db(exact, mx_jax.matmul(x, w, recipe=recipe, key=key))


def draw(axes: Any) -> None:
    for outlier in (1.0, 10.0, 100.0):
        values = [sqnr(size, outlier) for size in SIZES]
        axes.plot(range(len(SIZES)), values, marker="o", label=f"outliers x {outlier:g}")
    axes.set_xticks(range(len(SIZES)), ["none", *map(str, SIZES[1:])])
    axes.set(xlabel="size of the Hadamard transform", ylabel="SQNR of the product (dB)")
    axes.legend()


if __name__ == "__main__":
    parse_no_options(__doc__)
    for outlier in (1.0, 10.0, 100.0):
        print(outlier, {size: round(sqnr(size, outlier), 2) for size in SIZES})
    save("hadamard_sizes", draw)
