"""Bytes that whole products move on a GPU by default, beside bfloat16's.

    python tests/gpu/plain_traffic.py sm_100a [FILE]

A process of its own, as `compile_for` is. One line of JSON for each case; with a FILE, all of them
as one list. Counted, not measured: every kernel of the optimized module is
taken to read each of its operands once and to write its results, and no cache to help.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import mx_jax
from mx_jax import recipes
from tests.gpu.compile_for import GPUS, Gpu, array, compile_on

RECIPES = ("high_precision", "mxfp8", "mxfp4", "nvfp4")
# A Dense layer from 2048 features to 4096, of 2048 tokens; the side of larger weights.
TOKENS, FEATURES, UNITS = 2048, 2048, 4096
SIDE = 8192
# What moves nothing of its own.
_FREE = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")


def kernels(module: str, computation: str = "ENTRY") -> Iterator[int]:
    """Bytes that each kernel of an optimized module's entry reads and writes; of loops, in one
    iteration."""
    sizes: dict[str, int] = {}
    for line in module[module.index(f"\n{computation} ") :].partition("\n}")[0].splitlines()[2:]:
        match = re.match(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)", line)
        if not match:
            continue
        name, type_, operation, operands = match.groups()
        sizes[name] = sum(_bytes(*array) for array in re.findall(r"([a-z]\w+)\[([\d,]*)\]", type_))
        if operation == "while":
            for part in re.findall(r"(?:condition|body)=(%[\w.-]+)", line):
                yield from kernels(module, part)
        elif operation not in _FREE:
            read = set(re.findall(r"%([\w.-]+)", operands))
            yield sizes[name] + sum(sizes[operand] for operand in read)


def _bytes(dtype: str, lengths: str) -> int:
    digits = re.search(r"\d+", dtype)
    # Booleans have none, and take a byte.
    bits = int(digits[0]) if digits else 8
    return math.prod(int(n) for n in lengths.split(",") if n) * bits // 8


def moved(gpu: Gpu, function: Any, *operands: Any) -> dict[str, Any]:
    """Kernels, and MiB that they move."""
    sizes = list(kernels(compile_on(gpu, function, operands).as_text()))
    return {"kernels": len(sizes), "MiB": round(sum(sizes) / 2**20, 1)}


def training_step(gpu: Gpu, name: str, dtype: str) -> dict[str, Any]:
    """A Dense layer in bfloat16 with both gradients; weights and their gradient of a dtype."""
    recipe = getattr(recipes, name)()

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w.astype(jnp.bfloat16), recipe=recipe)

    def step(w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(product, w, x)
        return y, *pullback(g)

    operands = (array(FEATURES, UNITS, dtype=dtype), array(TOKENS, FEATURES), array(TOKENS, UNITS))
    return {"what": "training step", "weights": dtype, "by": name, **moved(gpu, step, *operands)}


def apart(gpu: Gpu, name: str, dtype: str) -> dict[str, Any]:
    """The same where the forward pass is compiled apart from the backward, as by `lax.scan`."""
    recipe = getattr(recipes, name)()
    operands = array(FEATURES, UNITS, dtype=dtype), array(TOKENS, FEATURES)

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w.astype(jnp.bfloat16), recipe=recipe)

    def forward(w: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(product, w, x)
        return y, *jax.tree.leaves(pullback)

    # What is kept as it came is not written again.
    jaxpr = jax.make_jaxpr(forward)(*operands).jaxpr
    new = [i for i, kept in enumerate(jaxpr.outvars) if kept not in jaxpr.invars]
    pullback = jax.eval_shape(lambda w, x: jax.vjp(product, w, x)[1], *operands)
    leaves, tree = jax.tree.flatten(pullback)
    there = moved(gpu, lambda w, x: [forward(w, x)[i] for i in new], *operands)
    back = moved(
        gpu, lambda g, *leaves: jax.tree.unflatten(tree, leaves)(g), array(TOKENS, UNITS), *leaves
    )
    result = {key: round(there[key] + back[key], 1) for key in there}
    return {"what": "training step, passes apart", "weights": dtype, "by": name, **result}


def whole_axes(gpu: Gpu, name: str) -> Iterator[dict[str, Any]]:
    """A product of 4096 x 8192 by 8192 x 8192, whose casts have one scale a row; with gradients."""
    recipe = getattr(recipes, name)()

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipe)

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(product, x, w)
        return y, *pullback(g)

    operands = array(4096, SIDE), array(SIDE, SIDE), array(4096, SIDE)
    yield {"what": "whole axes", "by": name, **moved(gpu, product, *operands[:2])}
    yield {"what": "whole axes, with gradients", "by": name, **moved(gpu, step, *operands)}


def lines(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Every case, each with its ratio to what it is compared with."""
    baselines = whole_axes(gpu, "high_precision")
    for baseline, line in zip(baselines, whole_axes(gpu, "float8_rowwise"), strict=True):
        yield baseline
        yield line | {"ratio": round(line["MiB"] / baseline["MiB"], 3)}
    for dtype in ("bfloat16", "float32"):
        for count in (training_step, apart):
            steps = [count(gpu, name, dtype) for name in RECIPES]
            for line in steps:
                yield line | {"ratio": round(line["MiB"] / steps[0]["MiB"], 2)}


if __name__ == "__main__":
    result = []
    for line in lines(GPUS[sys.argv[1]]):
        result.append(line)
        print(json.dumps(line), flush=True)
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(result, indent=1) + "\n")
