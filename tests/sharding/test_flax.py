"""Kernels gathered as codes by what Flax's metadata say, in models that nobody edited."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import convert, recipes
from tests.quick import quick
from tests.sharding.collectives import gathered

P = PartitionSpec
RECIPE = dataclasses.replace(recipes.mxfp4(), gather="fsdp")
FEATURES = 128
# Codes of half a byte and a scale for each block of 32, in both orientations.
NBYTES = 2 * (FEATURES**2 // 2 + FEATURES**2 // 32)
RULES = convert.Rule(".*", "mxfp4", gather="fsdp")
INIT = nn.initializers.lecun_normal()


class Ours(nn.Module):
    init_fn: Any
    gather: Any = "fsdp"

    @nn.compact
    def __call__(self, x):
        dense = mx_jax.nn.linen.Dense
        return dense(FEATURES, recipe="mxfp4", gather=self.gather, kernel_init=self.init_fn)(x)


class Theirs(nn.Module):
    init_fn: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(FEATURES, kernel_init=self.init_fn)(x)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(256, FEATURES)).astype(np.float32)


def exchanged(
    loss: Any, mesh: jax.sharding.Mesh, params: Any, x: np.ndarray, dtype: str = "u8"
) -> int:
    """Bytes of u8 that a training step gathers, and nothing else."""
    spec = P("fsdp", None)

    def placed(array: jax.Array) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, spec if array.ndim == 2 else P())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(
            jax.tree.map(placed, params), placed(jnp.asarray(x))
        )
        text = compiled.compile().as_text()
    assert text is not None
    assert gathered(text) == gathered(text, dtype)
    return gathered(text)


@pytest.mark.slow(but="True-True")
@pytest.mark.parametrize("boxed", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_linen(ours: bool, boxed: bool, mesh, x):
    init = nn.with_partitioning(INIT, ("fsdp", None))
    model: Any = Ours(init) if ours else convert.linen(Theirs(init), RULES)
    variables = quick(model.init)(jax.random.key(0), x)
    plain = nn.unbox(variables)
    expected = model.apply(plain, x)
    params = variables if boxed else plain

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).sum()

    assert exchanged(loss, mesh, params, x) == NBYTES
    with jax.set_mesh(mesh):
        actual = jax.jit(model.apply)(params, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("ours", [True, False])
def test_linen_with_nothing_said(ours: bool, mesh, x):
    """Where the parameters lie is enough: no metadata, no names of axes."""
    rule = convert.Rule(".*", "mxfp4")
    model: Any = Ours(INIT, None) if ours else convert.linen(Theirs(INIT), rule)
    variables = quick(model.init)(jax.random.key(0), x)
    loss = lambda variables, x: (model.apply(variables, x) ** 2).sum()  # noqa: E731
    assert exchanged(loss, mesh, variables, x) == NBYTES


def test_nnx_with_nothing_said(mesh, x):
    layer = mx_jax.nn.nnx.Linear(FEATURES, FEATURES, recipe="mxfp4", rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    loss = lambda state, x: (nnx.merge(graph, state)(x) ** 2).sum()  # noqa: E731
    assert exchanged(loss, mesh, state, x) == NBYTES


@pytest.mark.parametrize("layer", ["Dense", "DenseGeneral", "Einsum"])
def test_linen_fields(layer: str):
    """The layer's own in place of the recipe's."""
    shape = ((4, 4), "ab,bc->ac") if layer == "Einsum" else (4,)
    made: Any = getattr(mx_jax.nn.linen, layer)(*shape, recipe=RECIPE, gather="model")
    assert made.recipe.gather.axes == made.clone().recipe.gather.axes == ("model",)


def test_linen_with_logical_names(mesh, x):
    model: Any = Ours(nn.with_logical_partitioning(INIT, ("embed", "mlp")))
    with nn.logical_axis_rules([("embed", "fsdp"), ("mlp", None)]):
        plain = nn.unbox(model.init(jax.random.key(0), x))
        loss = lambda variables, x: (model.apply(variables, x) ** 2).sum()  # noqa: E731
        assert exchanged(loss, mesh, plain, x) == NBYTES


@pytest.mark.slow(but="True")
@pytest.mark.parametrize("ours", [True, False])
def test_nnx(ours: bool, mesh, x):
    init = nnx.with_partitioning(INIT, ("fsdp", None))
    with jax.set_mesh(mesh):
        if ours:
            layer: Any = mx_jax.nn.nnx.Linear(
                FEATURES,
                FEATURES,
                recipe="mxfp4",
                gather="fsdp",
                kernel_init=init,
                rngs=nnx.Rngs(0),
            )
        else:
            layer = nnx.Linear(FEATURES, FEATURES, kernel_init=init, rngs=nnx.Rngs(0))
            layer = convert.nnx(layer, RULES)
    graph, state = nnx.split(layer)

    def loss(state, x):
        return (nnx.merge(graph, state)(x) ** 2).sum()

    assert exchanged(loss, mesh, state, x) == NBYTES


def test_kernels_without_metadata_are_not_gathered(mesh, x):
    model: Any = Ours(INIT)
    variables = quick(model.init)(jax.random.key(0), x)
    with jax.set_mesh(mesh):
        assert model.apply(variables, x).shape == x.shape
