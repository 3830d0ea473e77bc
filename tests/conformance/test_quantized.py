"""Every quantized tensor of the golden files, bit for bit: scales, codes and values.

Three ways of running: inside the caller's `jax.jit`, operation by operation (`jax.disable_jit`),
and as a plain call, where only the library's own jit compiles. The first covers every array in the
default run; the others compile more programs: the default run makes a part of them, and
`pytest -m slow` the rest.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conformance import golden

SOURCES = tuple(golden.sources())
Source = tuple[str, str]


def name(source: Source) -> str:
    return f"{source[0].removesuffix('.npz')}-{source[1].removeprefix('in_')}"


PLAIN_BY_DEFAULT = {
    ("edges_f32.npz", "in_int8_b32"),
    ("edges_bf16.npz", "in_fp4_e2m1_b16"),
    *(source for source in SOURCES if source[0] == "nvfp4.npz"),
}
# The edges: what else differs in dtype or scales is slow.
EAGER_BY_DEFAULT = {source for source in SOURCES if source[0] == "edges_f32.npz"}


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


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source, id=name(source), marks=() if source in EAGER_BY_DEFAULT else pytest.mark.slow
        )
        for source in SOURCES
    ],
)
def test_operation_by_operation(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    rows = x.shape[0]
    if not source[0].startswith("blocks"):
        x, rows = as_rows(source, x)
    with jax.disable_jit():
        results = golden.reproduce(cases, x)
    assert golden.check(cases, results, rows) == num_outputs(source)


@pytest.mark.parametrize("source", SOURCES, ids=name)
def test_jit(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    results = jax.jit(lambda x: golden.reproduce(cases, x))(x)
    assert golden.check(cases, results, x.shape[0]) == num_outputs(source)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source, id=name(source), marks=() if source in PLAIN_BY_DEFAULT else pytest.mark.slow
        )
        for source in SOURCES
    ],
)
def test_plain_call(source: Source):
    cases, x = golden.sources()[source], golden.load(source)
    results = golden.reproduce(cases, x)
    assert golden.check(cases, results, x.shape[0]) == num_outputs(source)


def test_a_wrong_bit_is_noticed():
    """The comparison itself: one code or scale off by one, one value of the other sign."""
    source = ("blocks_f32.npz", "in_A16")
    case = golden.sources()[source][0]
    for what in ("codes", "scales", "values"):
        stored = golden.arrays(case.file)[case.outputs[what]]
        right = stored.view(np.float32) if what == "values" else stored
        case.check(what, right)
        wrong = stored.copy()
        wrong.flat[7] ^= np.uint8(1) if what != "values" else np.uint32(1 << 31)
        with pytest.raises(AssertionError, match=rf"{case.outputs[what]}: 1 of \d+ elements"):
            case.check(what, wrong.view(right.dtype))
