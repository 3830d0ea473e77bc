"""jit, vmap, scan, remat and checks of gradients: the same bits as without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick, with_gradients
from tests.sharding.collectives import check, draw_all

RECIPE = recipes.mxfp4()
NUM = 3


def matmul(x, w):
    return mx_jax.matmul(x, w, recipe=RECIPE)


plain = with_gradients(matmul)

# Stacks of three operands and cotangents; products of them need no rounding.
ARRAYS = draw_all((NUM, 6, 70), (NUM, 70, 37), (NUM, 6, 37))


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """Product and cotangents one by one, each without a transformation around."""
    one_by_one = [plain(*operands) for operands in zip(*ARRAYS, strict=True)]
    return [np.stack(results) for results in zip(*one_by_one, strict=True)]


def along_other_axes(x, w, g):
    run = jax.vmap(plain, in_axes=(1, 2, 1), out_axes=0)
    return run(x.swapaxes(0, 1), jnp.moveaxis(w, 0, 2), g.swapaxes(0, 1))


def scanned(x, w, g):
    return jax.lax.scan(lambda carry, operands: (carry, plain(*operands)), 0, (x, w, g))[1]


TRANSFORMED = {
    "batch axes": plain,
    "vmap_along_other_axes": along_other_axes,
    "scan": scanned,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_bits_are_those_of_the_plain_call(expected, name: str):
    check(quick(TRANSFORMED[name])(*ARRAYS), expected)


def test_mxarrays_under_vmap_and_scan(expected):
    """A stack of kernels, quantized one by one or at once, multiplied one by one or at once."""
    x, w, _ = ARRAYS
    quantize = functools.partial(mx_jax.quantize, format="mxfp4", scale_rule="even")

    @quick
    def run(x, w):
        one_by_one = jax.vmap(functools.partial(quantize, axis=0))(w)
        at_once = quantize(w, axis=1)
        scanned = jax.lax.scan(lambda carry, xw: (carry, matmul(*xw)), 0, (x, at_once))[1]
        mapped = jax.vmap(matmul)(x, one_by_one)
        shared = jax.vmap(matmul, in_axes=(0, None))(x, at_once[1])
        return one_by_one, at_once, scanned, mapped, shared

    one_by_one, at_once, scanned, mapped, shared = run(x, w)
    assert one_by_one.blocks == at_once.blocks == ((-2, 32),)
    jax.tree.map(assert_bitwise_equal, one_by_one, at_once)
    check((scanned, mapped, shared[1]), (expected[0], expected[0], expected[0][1]))


def test_forward_mode_is_refused():
    """A quantized product has three casts of its own; there is no tangent product among them."""
    x = np.ones((2, 32), np.float32)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda x: matmul(x, x.T), (x,), (x,))
