"""What one group's matrix or rows hold never reaches another group."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import recipes
from mx_jax.ops.ragged_dot import ragged_dot
from tests.needs import CPU_BACKENDS
from tests.quick import quick, with_gradients
from tests.sharding.collectives import mesh_of

KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (12, 64))
W = jax.random.normal(KEYS[1], (4, 64, 32))
G = jax.random.normal(KEYS[2], (12, 32))
SIZES = jnp.array([4, 0, 5, 1])
MIDDLE = slice(4, 9)  # rows of group 2
RECIPES = {
    "mxfp8": recipes.mxfp8(),
    "kept as they came": dataclasses.replace(recipes.mxfp4(), residuals="primal"),
    "nvfp4": recipes.nvfp4(),
    "weights": recipes.weight_only("mxfp4"),
    "high precision": recipes.high_precision(),
}


@functools.partial(quick, static_argnums=(0, 1))
def products(backend, recipe, x, w, g):
    """The product and both gradients."""
    with mx_jax.only_backend(backend):
        multiply = functools.partial(ragged_dot, group_sizes=SIZES, recipe=recipe)
        return with_gradients(multiply)(x, w, g)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_unused_experts_and_rows_of_none(recipe, value: float):
    spoilt = X.at[10:].set(value), W.at[1].set(value), G.at[10:].set(value)
    run = functools.partial(products, "reference", recipe)
    for actual, wanted in zip(run(*spoilt), run(X, W, G), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_an_expert_that_rows_use(name: str, backend: str):
    """One column of NaN, as a part of a matrix has it, and one row of each operand."""
    run = functools.partial(products, backend, RECIPES[name])
    y, dx, dw = run(X, W, G)
    others = np.delete(np.arange(12), np.arange(12)[MIDDLE])
    bad_y, bad_dx, bad_dw = run(X, W.at[2, :, 3].set(np.nan), G)
    np.testing.assert_array_equal(bad_y[others], y[others])
    np.testing.assert_array_equal(bad_y[:, 4:], y[:, 4:])
    assert np.isnan(bad_y[MIDDLE, 3]).all()
    np.testing.assert_array_equal(bad_dx[others], dx[others])
    assert np.isnan(bad_dx[MIDDLE]).any(1).all()
    np.testing.assert_array_equal(bad_dw, dw)
    bad_y, bad_dx, bad_dw = run(X.at[5].set(np.nan), W, G.at[6].set(np.nan))
    np.testing.assert_array_equal(np.delete(bad_y, 5, 0), np.delete(y, 5, 0))
    np.testing.assert_array_equal(np.delete(bad_dx, 6, 0), np.delete(dx, 6, 0))
    np.testing.assert_array_equal(np.delete(bad_dw, 2, 0), np.delete(dw, 2, 0))
    assert np.isnan(bad_y[5]).all() and np.isnan(bad_dw[2]).all()


def test_mapped_and_differentiated():
    """Each batch has its groups, and second derivatives their own products."""
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    w = jnp.stack([W.at[1].set(np.nan), W.at[2].set(np.nan)])  # unused in its batch

    def loss(x, w, sizes):
        return jnp.sum(jnp.tanh(ragged_dot(x, w, sizes, recipe="mxfp8")) ** 2)

    def penalty(x, w, sizes):
        return jnp.sum(jax.grad(loss)(x, w, sizes) ** 2)

    with mx_jax.only_backend("reference"):
        result = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(X, w, sizes)
        recipe = dataclasses.replace(recipes.mxfp8(), residuals="primal")
        loss = lambda x, w, sizes: jnp.sum(  # noqa: E731
            jnp.tanh(ragged_dot(x, w, sizes, recipe=recipe)) ** 2
        )
        again = jax.jit(jax.grad(penalty))(X, w[0], SIZES)
    assert jnp.isfinite(result).all() and jnp.isfinite(again).all()
    assert jnp.abs(result[:, :10]).max(-1).all() and jnp.abs(again[:10]).max(-1).all()


def test_experts_on_several_devices():
    """Rows of eight devices, each with one expert; one expert is NaN, and no row is sent to it."""
    mesh = mesh_of(e=8)
    x = jax.random.normal(KEYS[0], (8 * 8, 64))
    w = jax.random.normal(KEYS[1], (8, 64, 32))
    sizes = jnp.tile(jnp.array([1, 1, 1, 0, 1, 1, 1, 1]), 8)

    @quick
    def products(x, w):
        def loss(x, w):
            run = functools.partial(mx_jax.expert_ragged_dot, axis_name="e", recipe="mxfp8")
            split = jax.shard_map(run, mesh=mesh, in_specs=P("e"), out_specs=P("e"))
            y = split(x, w, sizes)
            return jnp.sum(y**2), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, *gradients

    with mx_jax.only_backend("reference"):
        result = products(x.at[7::8].set(np.nan), w.at[3].set(np.nan))
        for actual, wanted in zip(result, products(x, w), strict=True):
            np.testing.assert_array_equal(actual, wanted)
