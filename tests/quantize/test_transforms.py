"""Gradients pass straight through casts, whatever transforms them; two casts are one call."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import FLOAT8_TENSORWISE_E4M3, MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4
from mx_jax.testing.compare import assert_bitwise_equal

FORMATS = (MXFP8_E4M3, MXFP4, MXINT8, NVFP4, FLOAT8_TENSORWISE_E4M3)

# Factors of the values are their cotangent.
X, WEIGHTS = np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)


def round_trip(x, format, **options):
    return mx_jax.quantize(x, format, **options).dequantize()


def test_gradient_is_the_identity():
    """Of quantize().dequantize() and of cast, which is it, also for clipped values."""

    for format in FORMATS:
        for way in ({}, {"axis": 0}, {"rounding": "toward_zero"}):
            casts = (functools.partial(c, format=format, **way) for c in (round_trip, mx_jax.cast))
            results = [jax.jit(functools.partial(jax.vjp, c))(X) for c in casts]
            assert_bitwise_equal(results[0][0], results[1][0])
            for _, pullback in results:
                assert_bitwise_equal(pullback(WEIGHTS)[0], WEIGHTS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradient_has_the_dtype_of_x(dtype):
    narrow, cotangent = jnp.asarray(X, dtype), jnp.asarray(WEIGHTS, dtype)

    @jax.jit
    def gradients(x):
        same = jax.vjp(lambda x: round_trip(x, MXFP4), x)[1](cotangent)
        wide = jax.vjp(lambda x: mx_jax.quantize(x, MXFP4).dequantize(jnp.float32), x)[1](
            cotangent.astype(jnp.float32)
        )
        cast = jax.vjp(lambda x: mx_jax.cast(x, MXFP4), x)[1](cotangent)
        return same + wide + cast

    for gradient in gradients(narrow):
        assert_bitwise_equal(gradient, cotangent)


def test_gradient_through_index_and_transpose():
    """The link follows what happens to the codes."""

    @jax.jit
    def gradient(x):
        def loss(x):
            quantized = mx_jax.quantize(x, MXFP4)
            transposed = quantized.T.dequantize() * WEIGHTS.T
            return jnp.sum(transposed) + jnp.sum(quantized[1:, 32:].dequantize())

        return jax.grad(loss)(x)

    expected = WEIGHTS.copy()
    expected[1:, 32:] += np.float32(1)
    assert_bitwise_equal(gradient(X), expected)


def test_forward_mode_and_higher_order():
    value, tangent = jax.jvp(lambda x: round_trip(x, MXFP4), (X,), (WEIGHTS,))
    assert_bitwise_equal(tangent, WEIGHTS)
    assert_bitwise_equal(value, mx_jax.cast(X, MXFP4))
    # sum(Q(x)^2): the gradient is 2 Q(x), and its derivative along v is 2 v.
    hvp = jax.jvp(jax.grad(lambda x: jnp.sum(round_trip(x, MXFP4) ** 2)), (X,), (WEIGHTS,))
    assert_bitwise_equal(hvp[0], 2 * np.asarray(value))
    assert_bitwise_equal(hvp[1], 2 * WEIGHTS)


def test_cast_cotangent():
    """The identity forward; backward, the cotangent as the format has it: under every transform."""

    def loss(x, w):
        return jnp.sum(mx_jax.cast_cotangent(x, MXFP8_E5M2, axis=-1, block_size=8) * w)

    def in_scan(x, w):
        _, losses = jax.lax.scan(lambda _, xw: (None, loss(*xw)), None, (x, w))
        return losses.sum()

    @jax.jit
    def everything(x):
        return {
            "value": mx_jax.cast_cotangent(x, MXFP8_E5M2),
            "grad": jax.grad(loss)(x, WEIGHTS),
            "vmap": jax.vmap(jax.grad(loss))(x, WEIGHTS),
            "scan": jax.grad(in_scan)(x, WEIGHTS),
            "remat": jax.grad(jax.checkpoint(loss))(x, WEIGHTS),
        }

    results = everything(X)
    assert_bitwise_equal(results.pop("value"), X)
    expected = mx_jax.cast(WEIGHTS, MXFP8_E5M2, block_size=8)
    assert (np.asarray(expected) != WEIGHTS).any()
    for way, gradient in results.items():
        assert_bitwise_equal(gradient, expected, what=way)
    assert_bitwise_equal(jax.grad(loss)(X, WEIGHTS), expected, what="outside jit")


def test_cast_cotangent_with_a_key():
    def gradient(x, key):
        def loss(x):
            options = {"rounding": "stochastic", "key": key}
            return jnp.sum(mx_jax.cast_cotangent(x, MXFP4, **options) * WEIGHTS)

        return jax.grad(loss)(x)

    keys = jax.random.split(jax.random.key(0), 2)
    first, second = (jax.jit(gradient)(X, key) for key in keys)
    for key, got in zip(keys, (first, second), strict=True):
        expected = mx_jax.cast(WEIGHTS, MXFP4, rounding="stochastic", key=key)
        assert_bitwise_equal(got, expected)
    assert (np.asarray(first) != np.asarray(second)).any()


def test_cast_cotangent_checks_its_options_at_once():
    with pytest.raises(ValueError, match="unknown block format name='mxfp5'"):
        mx_jax.cast_cotangent(X, "mxfp5")
    with pytest.raises(ValueError, match="stochastic rounding needs a key"):
        mx_jax.cast_cotangent(X, MXFP4, rounding="stochastic")
    with pytest.raises(TypeError, match="cast_cotangent: needs float32, bfloat16 or float16"):
        mx_jax.cast_cotangent(np.ones(3, np.int32), MXFP4)
    with pytest.raises(TypeError, match="cast: needs float32, bfloat16 or float16"):
        mx_jax.cast(np.ones(3, np.int32), MXFP4)


# Two casts in one ---------------------------------------------------------------------------------


Y = jax.random.normal(jax.random.key(0), (3, 40, 96))


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
    jax.tree.map(assert_bitwise_equal, *both(Y))


def test_gradients_pass_straight_through_both():
    weights = jax.random.normal(jax.random.key(2), (2, *Y.shape))

    def loss(x):
        pair = mx_jax.quantize_both(x, "mxfp8_e4m3")
        return sum((q.dequantize() * w).sum() for q, w in zip(pair, weights, strict=True))

    for function in (loss, jax.checkpoint(loss)):
        assert_bitwise_equal(jax.jit(jax.grad(function))(Y), weights[0] + weights[1])


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
