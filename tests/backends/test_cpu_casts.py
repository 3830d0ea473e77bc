"""Casts by compiled handlers are the reference's: beyond amax, transforms, tensor scales."""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.formats import block_format
from mx_jax.ops.product import transformed
from mx_jax.recipes import Hadamard
from mx_jax.reference import hadamard
from mx_jax.testing.backend_suite import compare_casts
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

pytestmark = needs_library


@pytest.mark.parametrize(("format", "axis"), [("nvfp4", 0), ("nvfp4_2d", -1)])
def test_the_better_of_two_casts(format: str, axis: int):
    """The reference's choice, where squares of errors are subnormal, which XLA takes for 0."""
    x = 1e-20 * jax.random.normal(jax.random.key(2), (3, 40, 88)) ** 3
    x = x.at[0, :16].set(0).at[1, 3, 5].set(jnp.nan)
    case = QuantizeCase(format=block_format(format), shape=x.shape, axis=axis)
    call = dataclasses.replace(case, scale_rule="four_over_six").call
    compare_casts(CPU_FFI, call, x, np.random.default_rng(0))


def test_a_block_may_be_longer_than_its_axis():
    x = jax.random.normal(jax.random.key(3), (64, 48))
    cast = lambda size: mx_jax.quantize(  # noqa: E731
        x, "nvfp4", scale_rule="four_over_six", block_size=size
    )
    assert_bitwise_equal(cast(2**37).codes, cast(48).codes)


RNG = np.random.default_rng(0)


def drawn(shape: tuple[int, ...], dtype: str, size: int) -> tuple[jax.Array, Hadamard]:
    signs = tuple(RNG.choice([-1, 1], size).tolist())
    return jnp.asarray(RNG.normal(size=shape), dtype), Hadamard(size=size, signs=signs)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *[(2, "float32"), (4, "bfloat16"), (8, "float16"), (16, "float32")],
        *[(32, "bfloat16"), (64, "float16"), (128, "float32"), (1024, "bfloat16")],
    ],
)
def test_the_values_of_the_reference(size: int, dtype: str):
    shapes = [((5, size + 3), 1), ((2 * size + 1, 33), 0)]
    if size == 16:
        shapes += [((2, 3 * size - 1, 2, 3), 1), ((size + 1,), 0), ((0, size), 1)]
    for shape, axis in shapes:
        x, transform = drawn(shape, dtype, size)
        actual = transformed(x, transform, None, axis)
        as_float64 = np.moveaxis(np.asarray(x, np.float64), axis, -1)
        missing = -x.shape[axis] % size
        padded = np.pad(as_float64, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)
        # Over sqrt(size) in float64, which float32's matrix rounds.
        square = np.sign(hadamard.matrix(size)).astype(np.float64) / np.sqrt(size)
        exact = (groups * np.asarray(transform.signs, np.float64) @ square).reshape(padded.shape)
        exact = np.moveaxis(exact, -1, axis)
        assert actual.dtype == jnp.float32
        # Rounding of log2(size) sums of what may be as long as all of a group.
        bound = (np.log2(size) + 2) * 2.0**-24 * np.sqrt(size) * np.abs(exact).max(initial=1)
        assert (np.abs(np.asarray(actual, np.float64) - exact) <= bound).all(), (shape, axis)


def test_infinity_and_nan_stay_in_their_groups():
    x, transform = drawn((4, 64), "float32", 32)
    x = x.at[0, 3].set(jnp.inf).at[1, 40].set(jnp.nan)
    groups = np.asarray(transformed(x, transform, None, 1)).reshape(4, 2, 32)
    assert np.isinf(groups[0, 0]).all() and np.isnan(groups[1, 1]).all()
    assert np.isfinite(groups[[0, 1], [1, 0]]).all()


def test_groups_that_are_too_large():
    x, transform = drawn((4096,), "float32", 2048)
    text = str(mx_jax.inspect.explain(lambda x: transformed(x, transform, None, 0), x))
    assert "cpu_ffi: transforms groups of at most 1024, got size=2048" in text


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_program_has_calls_alone(batch: tuple[int, ...]):
    """Other operations around each of them took ten times as long to compile."""

    def product(x, w):
        return mx_jax.matmul(x, w, recipe="nvfp4")

    for _ in batch:
        product = jax.vmap(product)
    with mx_jax.only_backend("cpu_ffi"):
        lowered = jax.jit(product).lower(jnp.ones((*batch, 8, 64)), jnp.ones((*batch, 64, 32)))
    text = lowered.as_text("hlo")
    kinds = collections.Counter(re.findall(r"^ .* = .*?[\])}] ([a-z-]+)\(", text, re.MULTILINE))
    assert kinds.pop("custom-call") == 2 + 1
    assert not set(kinds) - {"parameter", "constant", "call", "tuple", "get-tuple-element"}
