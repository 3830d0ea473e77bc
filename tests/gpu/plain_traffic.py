"""Bytes that whole products move on a GPU by default, beside bfloat16's.

    python tests/gpu/plain_traffic.py sm_100a [FILE | experts]

A process of its own, as `compile_for` is. One line of JSON for each case; with a FILE, all of them
as one list; or of experts alone. Counted, not measured: every kernel of the optimized module is
taken to read each of its operands once and to write its results, and no cache to help.
"""

import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import mx_jax
from mx_jax import recipes
from tests.gpu.compile_for import GPUS, Gpu, array, compile_on

RECIPES = ("high_precision", "mxfp8", "mxfp4", "nvfp4")
FORMATS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
ROWS = (1, 16, 4096)
# A Dense layer from 2048 features to 4096, of 2048 tokens; weights of a decoder's layer.
TOKENS, FEATURES, UNITS = 2048, 2048, 4096
SIDE = 8192
# What moves nothing of its own.
_FREE = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")


def kernels(module: str, computation: str = "ENTRY") -> Iterator[int]:
    """Bytes that each kernel of an optimized module's entry reads and writes; of loops, in one
    iteration."""
    sizes: dict[str, int] = {}
    for line in module[module.index(f"\n{computation} ") :].partition("\n}")[0].splitlines()[2:]:
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)", line)
        if not found:
            continue
        name, type_, operation, operands = found.groups()
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
    found = list(kernels(compile_on(gpu, function, operands).as_text()))
    return {"kernels": len(found), "MiB": round(sum(found) / 2**20, 1)}


def training_step(gpu: Gpu, name: str, dtype: str) -> dict[str, Any]:
    """A Dense layer in bfloat16 with both gradients; weights and their gradient of a dtype."""
    recipe = getattr(recipes, name)()

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w.astype(jnp.bfloat16), recipe=recipe)

    def step(w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(product, w, x)
        return y, *pullback(g)

    operands = (
        array(FEATURES, UNITS, dtype=dtype),
        array(TOKENS, FEATURES),
        array(TOKENS, UNITS),
    )
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
        gpu,
        lambda g, *leaves: jax.tree.unflatten(tree, leaves)(g),
        array(TOKENS, UNITS),
        *leaves,
    )
    found = {key: round(there[key] + back[key], 1) for key in there}
    return {"what": "training step, passes apart", "weights": dtype, "by": name, **found}


def few_bit_weights(
    gpu: Gpu, name: str, rows: int, packed: bool, side: int = SIDE
) -> dict[str, Any]:
    """Bfloat16 activations by quantized weights, as they are or packed."""

    def quantized(w: jax.Array) -> Any:
        found = mx_jax.quantize(w, name, axis=0)
        return mx_jax.pack_weights(found) if packed else found

    with mx_jax.testing.target("cuda", gpu.capability):
        w = jax.eval_shape(quantized, array(side, side))
    recipe = recipes.weight_only(name)
    leaves, tree = jax.tree.flatten(w)

    def product(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, jax.tree.unflatten(tree, leaves), recipe=recipe)

    found = moved(gpu, product, array(rows, side), *leaves)
    what = "weight-only product, packed" if packed else "weight-only product"
    return {"what": what, "rows": rows, "by": name, **found}


def bfloat16_weights(gpu: Gpu, rows: int) -> dict[str, Any]:
    """The same product of bfloat16 weights."""
    found = moved(gpu, jnp.matmul, array(rows, SIDE), array(SIDE, SIDE))
    return {"what": "weight-only product", "rows": rows, "by": "bfloat16", **found}


def experts(gpu: Gpu, name: str, rows: int, groups: int = 8, side: int = 2880) -> dict[str, Any]:
    """Rows by few-bit matrices of experts that are packed, or in bfloat16: gpt-oss's sizes.

    Where groups have more rows than are multiplied at a time, of the first ones.
    """
    recipe: Any = recipes.high_precision() if name == "bfloat16" else recipes.weight_only(name)

    def packed(w: jax.Array) -> Any:
        if name == "bfloat16":
            return w
        return mx_jax.pack_weights(mx_jax.quantize(w, name, axis=1), contracting=1, num_batch=1)

    with mx_jax.testing.target("cuda", gpu.capability):
        w = jax.eval_shape(packed, array(groups, side, side))
    sizes = array(groups, dtype="int32")

    def product(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

    found = moved(gpu, product, array(rows, side), w, sizes)
    return {"what": f"{groups} experts of {side} x {side}", "tokens": rows, "by": name, **found}


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
    for rows in ROWS:
        few = [
            functools.partial(few_bit_weights, name=name, packed=packed)
            for packed in (False, True)
            for name in FORMATS
        ]
        yield from beside_bfloat16(bfloat16_weights, few, gpu=gpu, rows=rows)
    for name in FORMATS[:2]:
        line = few_bit_weights(gpu, name, 1, packed=True, side=2880)
        yield line | {"what": "weight-only product, k=2880"}
    yield from mixtures(gpu)


def mixtures(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Experts of gpt-oss's sizes in a decoding step and in a prefill."""
    for rows in (64, 4096):
        few = [functools.partial(experts, name=name) for name in FORMATS]
        bfloat16 = functools.partial(experts, name="bfloat16")
        yield from beside_bfloat16(bfloat16, few, gpu=gpu, rows=rows)


def beside_bfloat16(
    bfloat16: Callable[..., dict[str, Any]], others: Sequence[Callable[..., Any]], **facts: Any
) -> Iterator[dict[str, Any]]:
    """What is compared with, and the others with their ratio to it."""
    baseline = bfloat16(**facts)
    yield baseline
    for count in others:
        line = count(**facts)
        yield line | {"ratio": round(line["MiB"] / baseline["MiB"], 3)}


if __name__ == "__main__":
    found = []
    only_experts = sys.argv[2:] == ["experts"]
    for line in (mixtures if only_experts else lines)(GPUS[sys.argv[1]]):
        found.append(line)
        print(json.dumps(line), flush=True)
    if len(sys.argv) > 2 and not only_experts:
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")
