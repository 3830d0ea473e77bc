"""Statistics of casts: the compiled handler beside their definition in plain jnp."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import CastStatisticsCall
from mx_jax.backends.cpu_ffi import casts, library
from mx_jax.backends.select import select
from mx_jax.formats import MXFP8_E4M3
from mx_jax.formats.block import FLOAT8_TENSORWISE_E4M3
from mx_jax.inspect import statistics as inspect_statistics
from mx_jax.mxarray import MXArray
from mx_jax.reference import quantize, scale_rules
from mx_jax.reference import statistics as reference
from tests.needs import needs_library
from tests.processes import printed
from tests.quick import quick

loaded = library.load()
built = not isinstance(loaded, str) and casts.STATISTICS in loaded.targets
needs_handler = pytest.mark.skipif(not built, reason="the library was built without it")

# Sums of squares in float64, rounded once, beside those of float32, which err by some 1e-6.
BOUND = 1e-5
SUMS = ("signal", "noise")


def drawn(shape: tuple[int, ...], dtype: Any, nonfinite: bool) -> jax.Array:
    """Values over many powers of two, with zeros, and blocks with Inf and NaN if wanted."""
    source = np.random.default_rng(7)
    x = source.normal(size=shape) * np.exp(2 * source.normal(size=shape))
    x.reshape(-1)[:2] = 0
    if nonfinite:
        x.reshape(-1)[[3, 5, -1]] = np.inf, -np.inf, np.nan
    return jnp.asarray(x, dtype)


def compare(x: jax.Array, array: MXArray, axis: int, without: tuple[str, ...] = ()) -> Any:
    """Statistics of a cast, which are those of the definition; both."""
    of_cast = inspect_statistics.of_cast
    computed = lambda x, array: of_cast(x, array, axis, inspect_statistics.STATISTICS)  # noqa: E731
    defined = functools.partial(reference.of_cast, axis=axis)
    actual, expected = quick(computed)(x, array), quick(defined)(x, array)
    assert set(actual) == set(expected)
    for name in {*expected} - {*without}:
        left, right = actual[name], expected[name]
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        rtol = BOUND if name in SUMS else 0
        np.testing.assert_allclose(left, right, rtol=rtol, err_msg=name)
    return actual, expected


@needs_handler
@pytest.mark.parametrize(
    ("name", "shape", "axis", "dtype", "nonfinite"),
    [
        ("mxfp8_e4m3", (65, 96), -1, "float32", True),
        ("mxfp8_e5m2", (3, 40, 50), -2, "bfloat16", True),
        ("mxint8", (2, 70, 5), -2, "float16", False),
        ("nvfp4", (300, 700), -1, "float32", False),
        ("mxfp4", (77,), -1, "float32", True),
    ],
)
def test_the_handler_counts_exactly_and_sums_within_a_bound(name, shape, axis, dtype, nonfinite):
    x = drawn(shape, dtype, nonfinite)
    statistics, _ = compare(x, mx_jax.quantize(x, name, axis=axis), axis)
    assert (int(statistics["underflow"]) > 0) == (name != "mxfp8_e5m2")
    assert (int(statistics["bad_blocks"]) > 0) == nonfinite


@needs_handler
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_subnormals_are_counted_as_what_they_are(name, dtype):
    x = jnp.asarray(1e-38 * np.random.default_rng(7).normal(size=(64, 96)), dtype)
    # XLA's CPU has zeros for them in the reference's sums.
    statistics, expected = compare(x, mx_jax.quantize(x, name), -1, without=SUMS)
    assert float(statistics["signal"]) > float(expected["signal"]) > 0


def test_the_reference_tells_subnormals_from_zeros():
    half = np.zeros((8, 64), np.float32)
    half[::4], half[2::4] = 1e-39, -1e-39
    of_cast = quick(functools.partial(reference.of_cast, axis=-1))
    lost = of_cast(half, mx_jax.quantize(half, "mxfp4"))
    assert int(lost["underflow"]) == 256 and lost["amax"].view(np.int32) == 713624
    kept = mx_jax.quantize(8 * half, "mxfp4")
    assert int(of_cast(8 * half, kept)["underflow"]) == 0
    finite = np.asarray(quick(reference.finite_values)(kept)).view(np.int32)
    assert np.count_nonzero(finite & 0x7FFFFFFF) == 256
    clipped = np.full((8, 64), 1.999 * 2.0**-127, np.float32)
    assert int(of_cast(clipped, mx_jax.quantize(clipped, "mxint8"))["saturated"]) == 512


@needs_handler
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("format", "rule"),
    [
        (dataclasses.replace(MXFP8_E4M3, name="square", block=(32, 32)), scale_rules.RCEIL),
        (FLOAT8_TENSORWISE_E4M3, scale_rules.FLOAT8),
    ],
    ids=("square", "whole"),
)
def test_square_blocks_and_whole_tensors_have_channels_along_either_axis(format, rule, axis):
    x = drawn((70, 100), "float32", True)
    size = format.block[0]
    blocks = ((-2, size), (-1, size))
    array = quick(lambda x: quantize.quantize(x, format, blocks, rule))(x)
    statistics, _ = compare(x, array, axis)
    assert int(statistics["bad_blocks"]) == (2 if size == 32 else 1)


# How much more memory than before the process has taken once the statistics are there.
WIDE = """
import resource
import sys

import jax
import jax.numpy as jnp

import mx_jax
from mx_jax.inspect import statistics as inspect_statistics

shape, axis = eval(sys.argv[1])
x = jnp.ones(shape, jnp.bfloat16)
array = jax.block_until_ready(mx_jax.quantize(x, "mxfp8_e4m3", axis=-1))
of_cast = jax.jit(lambda x, array: inspect_statistics.of_cast(x, array, axis, {"channels"}))
run = of_cast.lower(x, array).compile()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(run(x, array))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@needs_handler
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is in another unit")
@pytest.mark.parametrize("case", [((2, 2**21), -1), ((2**21, 2), -2)], ids=["rows", "columns"])
def test_many_channels_take_no_more_memory_than_the_values(case):
    # Of 4 million elements: values in float32, and as many maxima; not 64 times the channels.
    assert int(printed("-c", WIDE, repr(case))) < 100 * 1024


CALL = CastStatisticsCall(
    shape=(64, 64), dtype=np.dtype("float32"), format=MXFP8_E4M3, blocks=((-1, 32),), axis=-1
)


@needs_handler
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": (0, 64)}, "needs elements, got shape=(0, 64)"),
        ({"scale_axes": (0,)}, "takes one tensor scale, got them along axes=(0,)"),
        ({"blocks": ((-2, 32), (-1, 32)), "shape": (64, 64)}, None),
        ({"blocks": ((-3, 32), (-2, 32)), "shape": (2, 64, 64)}, "two-dimensional blocks"),
        ({"dtype": np.dtype("float64")}, "reads float32, bfloat16 or float16, got dtype=float64"),
    ],
)
def test_which_calls_the_handler_takes(change, reason):
    choice = select(dataclasses.replace(CALL, **change))
    if reason is None:
        assert choice.backend.name == "cpu_ffi"
        return
    assert choice.backend.name == "reference"
    assert reason in dict(choice.rejections)["cpu_ffi"]


@needs_library
def test_a_library_without_the_handler_leaves_it_to_plain_jax(monkeypatch):
    assert isinstance(loaded, library.Library)
    older = dataclasses.replace(loaded, targets=loaded.targets - {casts.STATISTICS})
    monkeypatch.setattr(library, "load", lambda: older)
    choice = select(CALL)
    assert choice.backend.name == "reference"
    assert f"was built without {casts.STATISTICS}" in dict(choice.rejections)["cpu_ffi"]
    x = drawn((64, 64), "float32", False)
    compare(x, mx_jax.quantize(x, "mxfp8_e4m3"), -1)
