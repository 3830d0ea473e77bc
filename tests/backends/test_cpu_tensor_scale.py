"""Casts find the reference's tensor scale, and a program computes nothing else for it."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi import casts, library
from mx_jax.backends.target import on_one_device
from mx_jax.formats import NVFP4, NVFP4_2D, BlockFormat
from mx_jax.reference.quantize import quantize
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

LOADED = library.load()

pytestmark = needs_library


def found(x: jax.Array, call: QuantizeCall) -> jax.Array:
    """The tensor scale that the handler finds."""
    with on_one_device(True):
        scale = casts.quantize(x, None, None, call).tensor_scale
    assert scale is not None
    return scale


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "format"),
    [
        ((64, 96), -1, "float32", NVFP4),
        ((64, 96), 0, "bfloat16", NVFP4),
        ((3, 40, 50), 1, "float16", NVFP4),
        ((3, 40, 50), 0, "float32", NVFP4),
        ((40, 1), 0, "bfloat16", NVFP4),
        ((41,), 0, "float32", NVFP4),
        ((2, 40, 50), -1, "float32", NVFP4_2D),
        ((33, 1), -1, "bfloat16", NVFP4_2D),
    ],
)
def test_the_reference_s_scale(shape: tuple[int, ...], axis: int, dtype: str, format: BlockFormat):
    call = QuantizeCase(format=format, shape=shape, axis=axis, dtype=dtype).call

    @jax.jit
    def both(x):
        scale = quantize(x, call.format, call.blocks, call.scale_rule).tensor_scale
        return found(x, call), scale

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    for special in (0.0, np.inf, np.nan, -np.inf):
        # The largest value shares its block with what leaves the block out.
        x.flat[[3, 17 % x.size]] = 1e4, special
        for values in (x, np.full(shape, special, np.float32)):
            assert_bitwise_equal(*both(jnp.asarray(values, dtype)))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_empty_tensor_has_scale_one(shape: tuple[int, ...], axis: int):
    call = QuantizeCase(format=NVFP4, shape=shape, axis=axis).call
    assert found(jnp.zeros(shape), call).tolist() == [[1.0]]


# Programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_program_has_calls_alone(batch: tuple[int, ...]):
    """What XLA compiled around each of them took ten times as long as all else."""

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
