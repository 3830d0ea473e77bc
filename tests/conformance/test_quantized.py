"""Every quantized tensor of the golden files, bit for bit: scales, codes and values.

Three ways of running: inside the caller's `jax.jit`, operation by operation (`jax.disable_jit`),
and as a plain call, where only the library's own jit compiles. The default run has a part of each;
with `pytest -m slow` the first two cover every array.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance import golden

SOURCES = tuple(golden.sources())
Source = tuple[str, str]


def name(source: Source) -> str:
    return f"{source[0].removesuffix('.npz')}-{source[1].removeprefix('in_')}"


# Every layout, format, rule and rounding in one of the dtypes, and all of NVFP4.
JIT_BY_DEFAULT = (
    "blocks_f32-(A32|L16|M32)|blocks_bf16-(A16|R32)|edges_f32-.*b32|edges_bf16-.*b16|nvfp4"
)
PLAIN = "edges_f32-int8_b32|edges_bf16-fp4_e2m1_b16|nvfp4-f32_0|nvfp4-bf16_hard"
# The edges: what else differs in dtype or scales is slow.
EAGER_BY_DEFAULT = "edges_f32-.*b32"


def num_outputs(source: Source) -> int:
    return sum(len(case.outputs) for case in golden.sources()[source])


def as_rows(source: Source, x: jax.Array) -> tuple[jax.Array, int]:
    """Edges and NVFP4 tensors in a common shape, and how many of its rows are theirs.

    Operation by operation, JAX compiles every primitive for every shape. Blocks are independent,
    so blocks may stand in rows, and rows of zeros below them change nothing.
    """
    columns, rows = {"edges": (x.shape[-1], 180), "nvfp4": (16, 384)}[source[0][:5]]
    values = np.asarray(x).reshape(-1, columns)
    return jnp.asarray(np.pad(values, ((0, rows - len(values)), (0, 0)))), len(values)


@pytest.mark.slow(but=EAGER_BY_DEFAULT)
@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_operation_by_operation(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    rows = x.shape[0]
    if not source[0].startswith("blocks"):
        x, rows = as_rows(source, x)
    with jax.disable_jit():
        results = golden.reproduce(cases, x)
    assert golden.check(cases, results, rows) == num_outputs(source)


@pytest.mark.slow(but=JIT_BY_DEFAULT)
@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_jit(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    results = jax.jit(lambda x: golden.reproduce(cases, x))(x)
    assert golden.check(cases, results, x.shape[0]) == num_outputs(source)


@pytest.mark.parametrize("source", [s for s in SOURCES if re.search(PLAIN, name(s))], ids=name)
def test_plain_call(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    results = golden.reproduce(cases, x)
    assert golden.check(cases, results, x.shape[0]) == num_outputs(source)
