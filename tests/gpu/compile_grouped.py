"""Compile kernels for rows in groups on a machine without a GPU; ptxas's reports land in a folder.

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_grouped.py sm_90a mxfp4
    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_grouped.py sm_90a sums

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_grouped.py sm_100a mxfp4 scaled

A format: bfloat16 by weights of each group, for every entry of the tuning table and both dtypes
that the kernel writes; "sums": the gradient of the weights; "scaled": rows and weights of one
format, taken as they are, for every entry of the tuning table. A process of its own, as
`compile_for` is. The files' names end in the count of compiles before.

    python tests/gpu/compile_grouped.py sm_90a traffic [FILE]

Prints, as JSON, bytes that whole products move by the kernels and by XLA's own ragged product of
bfloat16, counted as `traffic.py` counts.
"""

import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp())

import jax
import jax.numpy as jnp

import mx_jax
from mx_jax import recipes
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, ScaledOperand, stored_bits
from mx_jax.backends.pallas_gpu.tiles import visits
from tests.gpu.compile_for import (
    FORMATS,
    GPUS,
    Gpu,
    K,
    N,
    compile_on,
    shapes,
)
from tests.gpu.traffic import kernels

GROUPS, ROWS = 4, 1024
NAMES = ("mxfp4", "nvfp4", "mxfp8_e4m3")
DTYPES = ("float32", "bfloat16")
# A layer of a mixture: 8 experts of 2880 x 2880, as gpt-oss has 32 of; tokens of a step each.
EXPERTS, SIDE, TOKENS = 8, 2880, (64, 4096)


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compile_groups(gpu: Gpu, name: str) -> None:
    """Rows in groups by packed weights of a format."""
    kernel, format = gpu.architecture.decoding, FORMATS[name]
    weights = shapes(PackedWeights.of, (GROUPS, N, K), format)
    for _, tiles in kernel.tuning_of(stored_bits(format.element)).tiles:
        for out_dtype in DTYPES:
            multiply = functools.partial(
                kernel.load(),
                n=N,
                format=format,
                tiles=tiles,
                out_dtype=out_dtype,
            )

            def product(x, codes, scales, factors, sizes, multiply=multiply, tiles=tiles):
                return multiply(x[None], codes, scales, visits(sizes, ROWS, tiles.m), factors)

            sizes = array(GROUPS, dtype="int32")
            factors = array(2 * GROUPS, dtype="float32")
            given = array(ROWS, K), weights.codes, weights.scales, factors, sizes
            compile_on(gpu, product, given)


def compile_sums(gpu: Gpu) -> None:
    """Sums over the rows of each group."""
    kernel = gpu.architecture.decoding
    assert kernel.load_group_sums is not None
    rows, factors = array(2 * GROUPS, dtype="int32"), array(2, dtype="float32")
    for out_dtype in DTYPES:
        tiles = products.sums_tiles(N, 2 * N)
        sums = functools.partial(kernel.load_group_sums(), tiles=tiles, out_dtype=out_dtype)
        compile_on(gpu, sums, (array(K, N), array(K, 2 * N), rows, factors))


def compile_scaled(gpu: Gpu, name: str) -> None:
    """Rows in groups by weights of the same format."""
    kernel, format = gpu.architecture.kernels[0], FORMATS[name]
    lay_out = functools.partial(mx_jax.quantize, format=format)
    x = jax.eval_shape(lay_out, array(ROWS, K))
    w = jax.eval_shape(lay_out, array(GROUPS, N, K))
    sizes = array(GROUPS, dtype="int32")
    table = kernel.tuning_of(format.element.bits).tiles
    for (_, tiles), out_dtype in zip(table, DTYPES, strict=True):

        def product(x, w, sizes, tiles=tiles, out_dtype=out_dtype):
            weights = ScaledOperand.of(dataclasses.replace(w, tensor_scale=None))
            how = {"architecture": gpu.architecture, "tiles": tiles}
            return products.multiply_scaled(x, weights, out_dtype, group_sizes=sizes, **how)[0]

        compile_on(gpu, product, (x, w, sizes))


def by_kernels(product: Callable[..., Any]) -> Callable[..., Any]:
    """The same, by this package's kernels."""

    def preferring(*operands: Any) -> Any:
        with mx_jax.prefer_backends("pallas_gpu"):
            return product(*operands)

    return preferring


def moved(gpu: Gpu, product: Callable[..., Any], *operands: Any) -> dict[str, Any]:
    """Kernels, and MiB that they move."""
    with mx_jax.testing.target("cuda", gpu.capability):
        found = list(kernels(compile_on(gpu, product, operands).as_text()))
    return {"kernels": len(found), "MiB": round(sum(found) / 2**20, 1)}


def stored_experts(gpu: Gpu, tokens: int) -> Iterator[dict[str, Any]]:
    """Bfloat16 tokens by experts packed once, and by bfloat16 ones."""
    x, sizes = array(tokens, SIDE), array(EXPERTS, dtype="int32")
    line = {"what": "experts that are stored", "tokens": tokens}
    w = array(EXPERTS, SIDE, SIDE)
    yield line | {"by": "bfloat16, lax.ragged_dot"} | moved(gpu, jax.lax.ragged_dot, x, w, sizes)
    for name in NAMES:

        def pack(w: jax.Array, name: str = name) -> Any:
            with mx_jax.prefer_backends("pallas_gpu"):
                stored = mx_jax.quantize(w, name, axis=1)
                return mx_jax.pack_weights(stored, contracting=1, num_batch=1)

        with mx_jax.testing.target("cuda", gpu.capability):
            packed = jax.eval_shape(pack, w)
        leaves, tree = jax.tree.flatten(packed)

        def product(x: Any, sizes: Any, *leaves: Any, tree: Any = tree, name: str = name) -> Any:
            weights = jax.tree.unflatten(tree, leaves)
            return mx_jax.ragged_dot(x, weights, sizes, recipe=recipes.weight_only(name))

        yield line | {"by": name} | moved(gpu, by_kernels(product), x, sizes, *leaves)


def training_step(gpu: Gpu, tokens: int) -> Iterator[dict[str, Any]]:
    """Output and both gradients of experts in bfloat16."""
    given = array(tokens, SIDE), array(EXPERTS, SIDE, SIDE), array(tokens, SIDE)
    line = {"what": "training step", "tokens": tokens}
    for name in ("high_precision", "mxfp8", "mxfp4"):

        def step(x: Any, w: Any, g: Any, sizes: Any, name: str = name) -> Any:
            def product(x: jax.Array, w: jax.Array) -> jax.Array:
                return mx_jax.ragged_dot(x, w, sizes, recipe=getattr(recipes, name)())

            y, pullback = jax.vjp(product, x, w)
            return y, *pullback(g)

        sizes = array(EXPERTS, dtype="int32")
        yield line | {"by": name} | moved(gpu, step, *given, sizes)
        if name != "high_precision":
            by = {"by": f"{name}, kernels"}
            yield line | by | moved(gpu, by_kernels(step), *given, sizes)


def traffic(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Every case."""
    for tokens in TOKENS:
        yield from stored_experts(gpu, tokens)
    yield from training_step(gpu, TOKENS[-1])


if __name__ == "__main__":
    target, what, *file = sys.argv[1:]
    if what == "traffic":
        found = []
        for line in traffic(GPUS[target]):
            found.append(line)
            print(json.dumps(line), flush=True)
        if file:
            told = {"counted": "tests/gpu/compile_grouped.py sm_90a traffic: not measured"}
            told |= {"jax": jax.__version__, "cases": found}
            Path(file[0]).write_text(json.dumps(told, indent=1) + "\n")
    elif file:
        compile_scaled(GPUS[target], what)
    elif what == "sums":
        compile_sums(GPUS[target])
    else:
        compile_groups(GPUS[target], what)
