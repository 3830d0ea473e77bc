"""What Hopper's kernel costs by count: instructions for each code, and how full the machine is.

    python tests/gpu/decoding_counts.py [FILE]

A process of its own, as `compile_for` is. One line of JSON for each case; with a FILE, all of them
as one list. Instructions are counted in the disassembly of what is compiled for an H200, bytes as
`traffic.py` counts them; which share of the machine's time goes to codes follows from sizes alone.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp())

import jax
import jax.numpy as jnp

from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.products import decoded
from mx_jax.backends.pallas_gpu.tuning.plan import Sizes, choose
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.measure.cases import SIZES
from tests.gpu import tools
from tests.gpu.compile_for import FORMATS, GPUS, compile_on, shapes
from tests.gpu.sass import issued
from tests.gpu.traffic import kernels

GPU = GPUS["sm_90a"]
NAMES = ("mxfp4", "nvfp4", "mxfp8_e4m3")
ROWS = (1, 16, 32, 64, 128)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def tiles_of(name: str, m: int, n: int, k: int) -> Tiles:
    """What a product of these sizes takes."""
    kernel, bits = GPU.architecture.decoding, storage(FORMATS[name].element).bits
    return choose(GPU.architecture, kernel, bits, batch=1, m=m, n=n, k=k)


def instructions(name: str, m: int) -> dict[str, Any]:
    """Of the tiles for a number of rows, in weights so long that loops stay loops."""
    n, k = 8192, 8192
    tiles, weights = tiles_of(name, m, n, k), shapes(PackedWeights.of, (1, n, k), FORMATS[name])
    how = {"format": FORMATS[name], "tiles": tiles, "out_dtype": jnp.float32}
    folder = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = set(folder.glob("*.ptx"))
    product = functools.partial(GPU.architecture.decoding.load(), n=n, **how)
    compile_on(GPU, product, (array(1, m, k), weights.codes, weights.scales))
    (ptx,) = set(folder.glob("*.ptx")) - before
    multiplying, copying = issued(tools.disassemble(ptx, "sm_90a"), tiles)
    return {
        "what": "instructions for a code",
        "weights": name,
        "rows": m,
        "multiplying": round(multiplying, 2),
        "copying": round(copying, 2),
        "sum": round(multiplying + copying, 2),
    }


def product(name: str, m: int, n: int, k: int) -> dict[str, Any]:
    """A whole product of packed weights: how full, and what is moved beside the kernel."""
    tiles, sizes = tiles_of(name, m, n, k), Sizes(batch=1, m=m, n=n, k=k)
    weights = shapes(PackedWeights.of, (1, n, k), FORMATS[name])
    leaves, tree = jax.tree.flatten(weights)

    def run(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return decoded.multiply(
            x, jax.tree.unflatten(tree, leaves), jnp.bfloat16, architecture=GPU.architecture
        )

    moved = list(kernels(compile_on(GPU, run, (array(1, m, k), *leaves)).as_text()))
    read = leaves[0].size * 4 + leaves[1].size * 4
    at_once = GPU.architecture.at_once(GPU.architecture.decoding)
    return {
        "what": "product",
        "weights": name,
        "rows": m,
        "n": n,
        "k": k,
        "full": round(sizes.filling(tiles, at_once), 3),
        "programs": sizes.stripes(tiles).programs,
        "steps of the longest": sizes.stripes(tiles).longest,
        "programs that share a tile": sizes.stripes(tiles).shares,
        "kernels": len(moved),
        "MiB": round(sum(moved) / 2**20, 2),
        "times codes and scales": round(sum(moved) / read, 3),
    }


def lines() -> Iterator[dict[str, Any]]:
    """Every case."""
    for name in NAMES:
        for m in ROWS:
            yield instructions(name, m)
    for n, k in SIZES:
        for m in (1, 16):
            yield product("mxfp4", m, n, k)


if __name__ == "__main__":
    found = []
    for line in lines():
        found.append(line)
        print(json.dumps(line), flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
