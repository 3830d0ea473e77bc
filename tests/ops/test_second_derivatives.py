"""Gradients of gradients: of the product in float32, its casts being identities, or refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.ops.ragged_dot import ragged_dot
from tests.quick import quick

KEYS = jax.random.split(jax.random.key(3), 4)
X, W, V = (
    jax.random.normal(KEYS[i], shape) / shape[0] ** 0.5
    for i, shape in enumerate([(16, 64), (64, 32), (64, 32)])
)
SIZES = jnp.array([5, 11])
NO_DERIVATIVE = r"quantize: codes have no derivative, got one by x of shape=.*residuals='primal'"


def losses(multiply):
    """A gradient penalty and a Hessian-vector product, in both orders of modes."""

    def loss(w, x):
        return (jnp.tanh(multiply(x, w)) ** 2).sum()

    def penalty(w):
        return (jax.grad(loss, 1)(w, X) ** 2).sum()

    def sloped(w):
        return (jax.grad(loss)(w, X) * V).sum()

    @quick
    def run(w):
        return (
            jax.grad(penalty)(w),
            jax.jvp(lambda w: jax.grad(loss)(w, X), (w,), (V,))[1],
            jax.grad(jax.checkpoint(sloped))(w),
        )

    return run(W)


def distance(result, wanted):
    return [
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        for a, b in zip(result, wanted, strict=True)
    ]


def ragged(recipe):
    def multiply(x, w):
        return ragged_dot(x, jnp.stack([w, -w]), SIZES, recipe=recipe)

    return multiply


def quantized_before(recipe):
    def multiply(x, w):
        return mx_jax.matmul(x, mx_jax.quantize(w, "mxfp8_e4m3", axis=0), recipe=recipe)

    return multiply


MULTIPLY = {
    "matmul": lambda recipe: lambda x, w: mx_jax.matmul(x, w, recipe=recipe),
    "converted": lambda recipe: mx_jax.convert.function(
        jnp.matmul, mx_jax.convert.Rule(".*", recipe)
    ),
}


@pytest.mark.parametrize("way", MULTIPLY)
@pytest.mark.parametrize(
    "recipe",
    [recipes.mxfp8(), dataclasses.replace(recipes.qat("mxfp8_e4m3"), residuals="primal")],
    ids=lambda recipe: recipe.name,
)
def test_derivatives_of_gradients_are_near_those_of_float32(way, recipe):
    multiply = MULTIPLY[way]
    result, wanted = losses(multiply(recipe)), losses(jnp.matmul)
    assert all(0 < each < 0.1 for each in distance(result, wanted))


def test_ragged_gradients_are_differentiated():
    """By both operands, in every order of modes: `jax.lax.ragged_dot` has not all of them."""

    def dense(x, w):
        of_group = jnp.repeat(jnp.array([1, -1, 0]), jnp.array([4, 9, 3]), total_repeat_length=16)
        return x @ w * of_group[:, None]

    def few(x, w, recipe):
        return ragged_dot(x, jnp.stack([w, -w]), jnp.array([4, 9]), recipe=recipe)

    def slopes(multiply):
        def loss(x, w):
            return (jnp.tanh(multiply(x, w)) ** 2).sum()

        def run(x, w):
            result = []
            for first in (0, 1):
                slope = jax.grad(loss, first)
                result += jax.grad(lambda x, w, slope=slope: (slope(x, w) ** 2).sum(), (0, 1))(x, w)
                result.append(jax.jvp(slope, (x, w), (x, V))[1])
            return [*result, jax.jacrev(jax.grad(loss, 1))(x, w)[0, :2]]

        return quick(run)(X, W)

    wanted = slopes(dense)
    for recipe in ("mxfp8", "float8_rowwise"):
        result = slopes(functools.partial(few, recipe=recipe))
        assert all(0 < each < 0.2 for each in distance(result, wanted)), recipe


def test_the_derivative_of_a_weight_only_gradient():
    w = mx_jax.quantize(W, "mxfp4", axis=0)

    def hvp(multiply):
        loss = jax.grad(lambda x: (jnp.tanh(multiply(x)) ** 2).sum())
        return quick(lambda x: jax.jvp(loss, (x,), (jnp.ones_like(x),))[1])(X)

    result = hvp(lambda x: mx_jax.matmul(x, w, recipe="mxfp4"))
    values = hvp(lambda x: x @ w.dequantize())
    assert 0 < float(jnp.linalg.norm(result - values) / jnp.linalg.norm(values)) < 0.5


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8_rowwise", "mxfp4_hadamard"])
def test_what_formats_hold_is_differentiated_exactly(recipe):
    """Casts of gradients do not enter the derivatives of gradients."""
    x, w, v = (jnp.exp2(jnp.round(each)).clip(0.5, 2) for each in (X, W, V))

    def mixed(multiply):
        def slope(w, x):
            return (jax.grad(lambda w: (multiply(x, w) * V[:16]).sum())(w) * v).sum()

        return quick(jax.grad(slope, (0, 1)))(w, x)

    key = KEYS[3] if recipe == "mxfp4_hadamard" else None
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        near,
        mixed(functools.partial(mx_jax.matmul, recipe=recipe, key=key)),
        mixed(functools.partial(jnp.matmul, precision="highest")),
    )


QUANTIZED = dataclasses.replace(recipes.mxfp8(), residuals="quantized")


@pytest.mark.parametrize("multiply", [MULTIPLY["matmul"], ragged, quantized_before])
def test_codes_kept_for_gradients_are_refused(multiply):
    with pytest.raises(ValueError, match=NO_DERIVATIVE):
        losses(multiply(QUANTIZED))


def test_gradients_under_nested_vmaps_are_differentiated():
    """The outer vmap is over weights, the inner one over rows."""
    x, w = jnp.stack([X, 2 * X]), jnp.stack([W, 2 * W, -W])

    def loss(x, w):
        return (jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8")) ** 2).sum()

    def mapped(x):
        return (jax.vmap(jax.vmap(jax.grad(loss), (0, None)), (None, 0))(x, w) ** 2).sum()

    def one_by_one(x):
        return sum((jax.grad(loss)(rows, part) ** 2).sum() for rows in x for part in w)

    result, expected = (quick(jax.grad(each))(x) for each in (mapped, one_by_one))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
