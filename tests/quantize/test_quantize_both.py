"""quantize_both gives what two calls of quantize give, whatever JAX does to it."""

import re

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax.testing.compare import assert_bitwise_equal

X = jax.random.normal(jax.random.key(0), (3, 40, 96))


def singly(x, axes=(-1, -2), key=None, **options):
    keys = (None, None) if key is None else jax.random.split(key)
    return tuple(
        mx_jax.quantize(x, axis=axis, key=k, **options) for axis, k in zip(axes, keys, strict=True)
    )


# Of formats, rules and blocks the shared suite says the same.
@pytest.mark.parametrize(
    "options",
    [
        dict(format="nvfp4", axes=(0, -1)),
        dict(format="mxfp4", rounding="stochastic", key=jax.random.key(1)),
    ],
    ids=lambda options: options["format"],
)
def test_as_two_single_casts(options):
    both = jax.jit(lambda x: (mx_jax.quantize_both(x, **options), singly(x, **options)))
    jax.tree.map(assert_bitwise_equal, *both(X))


def test_gradients_pass_straight_through_both():
    weights = jax.random.normal(jax.random.key(2), (2, *X.shape))

    def loss(x):
        pair = mx_jax.quantize_both(x, "mxfp8_e4m3")
        return sum((q.dequantize() * w).sum() for q, w in zip(pair, weights, strict=True))

    for function in (loss, jax.checkpoint(loss)):
        assert_bitwise_equal(jax.jit(jax.grad(function))(X), weights[0] + weights[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(axes=(-1,)), "quantize_both: needs two axes, got axes=(-1,)"),
        (dict(axes=(1, -1)), "needs two different axes, got axes=(1, -1) for shape=(2, 32)"),
        (dict(axes=(0, 2)), "axis=2 is out of range for shape=(2, 32)"),
        (dict(axes="01"), "quantize_both: axes must be a sequence of ints, got axes="),
        (dict(axes=1.5), "quantize_both: axes must be a sequence of ints, got axes="),
        (dict(rounding="stochastic"), "quantize_both: stochastic rounding needs a key"),
        (dict(tensor_scale=1.0), "format=mxfp4 has no tensor scale"),
        (dict(x=[1]), "quantize_both: needs float32, bfloat16 or float16 input"),
    ],
)
def test_bad_input(options, message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        mx_jax.quantize_both(**{"x": jnp.ones((2, 32)), "format": "mxfp4", **options})
