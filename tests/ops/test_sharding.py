"""Sharded operands, under jit and under shard_map: the bits of the unsharded result."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from tests.quick import quick
from tests.sharding.collectives import check, draw_all, mesh_of, place

P = PartitionSpec
RECIPE = recipes.mxfp4()

ARRAYS = draw_all((64, 128), (128, 64), (64, 64))


def test_no_gather_of_kept_axes():
    """Kept axes are not merged: two sharded ones cost no communication."""
    mesh = mesh_of(data=4, model=2)
    x = jax.ShapeDtypeStruct(
        (8, 4, 128), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
    )
    w = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    run = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=RECIPE))
    program = run.lower(x, w).compile().as_text()
    assert program is not None
    assert "all-gather" not in program and "all-reduce" not in program


def test_out_sharding():
    mesh = mesh_of(AxisType.Explicit, data=4, model=2)
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x, w = place(mesh, ARRAYS[:2], (P(), P()))
        for recipe in (RECIPE, recipes.high_precision()):
            product = mx_jax.dot_general(
                x, w, dimensions, recipe=recipe, out_sharding=P("data", "model")
            )
            assert jax.typeof(product).sharding.spec == P("data", "model")
            product = mx_jax.einsum("mk,kn->nm", x, w, recipe=recipe, out_sharding=P("model"))
            assert jax.typeof(product).sharding.spec == P("model", None)
            product = mx_jax.matmul(x, w, recipe=recipe, out_sharding=P(None, "model"))
            assert jax.typeof(product).sharding.spec == P(None, "model")
            row = mx_jax.matmul(x[0], w[None], recipe=recipe, out_sharding=P(None, "data"))
            assert row.shape == (1, w.shape[1]) and jax.typeof(row).sharding.spec == P(None, "data")


@pytest.mark.slow(but="model")
@pytest.mark.parametrize("spec", [P(), P("model")], ids=str)
def test_out_sharding_of_a_sharded_sum(spec):
    """k is sharded in both operands: the caller says where the sum goes, or JAX refuses it."""
    mesh = mesh_of(AxisType.Explicit, data=4, model=2)
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x, w = place(mesh, ARRAYS[:2], (P(None, "data"), P("data", None)))
        product = mx_jax.dot_general(x, w, dimensions, recipe=RECIPE, out_sharding=spec)
        row = mx_jax.dot_general(x[3], w, (((0,), (0,)), ((), ())), recipe=RECIPE, out_sharding=P())
        transposed = mx_jax.einsum("mk,kn->nm", x, w, recipe=RECIPE, out_sharding=P(None, *spec))
    assert jax.typeof(product).sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    assert jax.typeof(transposed).sharding.spec == P(None, *(spec or (None,)))
    expected = quick(functools.partial(mx_jax.matmul, recipe=RECIPE))(*ARRAYS[:2])
    check([product, row, transposed.T], [expected, expected[3], expected])
