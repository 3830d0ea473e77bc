"""Kernels gathered as codes by what Flax's metadata say, in models that nobody edited."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import convert, recipes
from tests.quick import quick
from tests.sharding.collectives import gathered

P = PartitionSpec
RECIPE = dataclasses.replace(recipes.mxfp4(), gather="fsdp")
FEATURES = 128
# Codes of half a byte and a scale for each block of 32, in both orientations.
NBYTES = 2 * (FEATURES**2 // 2 + FEATURES**2 // 32)
INIT = nn.initializers.lecun_normal()


class Model(nn.Module):
    """A layer of this library, or one of Flax."""

    init_fn: Any
    options: Any

    @nn.compact
    def __call__(self, x):
        dense = mx_jax.nn.linen.Dense if self.options else nn.Dense
        return dense(FEATURES, kernel_init=self.init_fn, **self.options)(x)


def linen_model(ours: bool, init: Any, gather: str | None = "fsdp") -> Any:
    if ours:
        return Model(init, {"recipe": "mxfp4", "gather": gather})
    return convert.linen(Model(init, {}), convert.Rule(".*", "mxfp4", gather=gather))


X = np.random.default_rng(0).normal(size=(256, FEATURES)).astype(np.float32)


def exchanged(
    loss: Any, mesh: jax.sharding.Mesh, params: Any, x: np.ndarray, dtype: str = "u8"
) -> int:
    """Bytes of u8 that a training step gathers, and nothing else."""
    spec = P("fsdp", None)

    def placed(array: jax.Array) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, spec if array.ndim == 2 else P())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    with jax.set_mesh(mesh):
        lowered = quick(jax.grad(loss, argnums=(0, 1))).lower(
            jax.tree.map(placed, params), placed(jnp.asarray(x))
        )
        text = lowered.compile().as_text()
    assert text is not None
    assert gathered(text) == gathered(text, dtype)
    return gathered(text)


@pytest.mark.slow(but="True-(boxed|no metadata)")
@pytest.mark.parametrize("metadata", ["boxed", "unboxed", "no metadata"])
@pytest.mark.parametrize("ours", [True, False])
def test_linen(ours: bool, metadata: str, mesh):
    """Without metadata where the parameters lie is enough."""
    is_said = metadata != "no metadata"
    init = nn.with_partitioning(INIT, ("fsdp", None)) if is_said else INIT
    model = linen_model(ours, init, "fsdp" if is_said else None)
    variables = quick(model.init)(jax.random.key(0), X)
    plain = nn.unbox(variables)
    params = variables if metadata == "boxed" else plain

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).sum()

    assert exchanged(loss, mesh, params, X) == NBYTES
    with jax.set_mesh(mesh):
        actual = quick(model.apply)(params, X)
    np.testing.assert_allclose(actual, quick(model.apply)(plain, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", ["Dense", "DenseGeneral", "Einsum"])
def test_linen_fields(layer: str):
    """The layer's own in place of the recipe's."""
    shape = ((4, 4), "ab,bc->ac") if layer == "Einsum" else (4,)
    made: Any = getattr(mx_jax.nn.linen, layer)(*shape, recipe=RECIPE, gather="model")
    assert made.recipe.gather.axes == made.clone().recipe.gather.axes == ("model",)


def test_linen_with_logical_names(mesh):
    model = linen_model(True, nn.with_logical_partitioning(INIT, ("embed", "mlp")))
    with nn.logical_axis_rules([("embed", "fsdp"), ("mlp", None)]):
        plain = nn.unbox(model.init(jax.random.key(0), X))
        loss = lambda variables, x: (model.apply(variables, x) ** 2).sum()  # noqa: E731
        assert exchanged(loss, mesh, plain, X) == NBYTES


NNX: dict[str, Any] = {
    "no metadata": lambda init: mx_jax.nn.nnx.Linear(
        FEATURES, FEATURES, recipe="mxfp4", rngs=nnx.Rngs(0)
    ),
    "metadata": lambda init: mx_jax.nn.nnx.Linear(
        FEATURES, FEATURES, recipe="mxfp4", gather="fsdp", kernel_init=init, rngs=nnx.Rngs(0)
    ),
    "converted": lambda init: convert.nnx(
        nnx.Linear(FEATURES, FEATURES, kernel_init=init, rngs=nnx.Rngs(0)),
        convert.Rule(".*", "mxfp4", gather="fsdp"),
    ),
}


@pytest.mark.slow(but="metadata")
@pytest.mark.parametrize("make", NNX.values(), ids=NNX)
def test_nnx(make: Any, mesh):
    with jax.set_mesh(mesh):
        layer = make(nnx.with_partitioning(INIT, ("fsdp", None)))
    graph, state = nnx.split(layer)

    def loss(state, x):
        return (nnx.merge(graph, state)(x) ** 2).sum()

    assert exchanged(loss, mesh, state, X) == NBYTES


def test_kernels_without_metadata_are_not_gathered(mesh):
    model = linen_model(True, INIT)
    variables = quick(model.init)(jax.random.key(0), X)
    with jax.set_mesh(mesh):
        assert model.apply(variables, X).shape == X.shape
