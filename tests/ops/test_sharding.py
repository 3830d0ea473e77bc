"""Sharded operands, under jit and under shard_map: the bits of the unsharded result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from tests.quick import quick, with_gradients
from tests.sharding.collectives import check, draw_all, mesh_of, place

P = PartitionSpec
RECIPE = recipes.mxfp4()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert jax.device_count() == 8
    return mesh_of(AxisType.Auto, "data")


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, ...]:
    return draw_all((64, 128), (128, 64), (64, 64))


def value_and_grads(x, w, g, recipe=RECIPE, **options):
    return with_gradients(functools.partial(mx_jax.matmul, recipe=recipe, **options))(x, w, g)


@pytest.fixture(scope="module")
def expected(arrays) -> list[jax.Array]:
    return quick(value_and_grads)(*arrays)


def test_no_gather_of_kept_axes(mesh: Mesh, arrays):
    """Kept axes are not merged: two sharded ones cost no communication."""
    x = jax.ShapeDtypeStruct(
        (8, 4, 128), jnp.float32, sharding=NamedSharding(mesh, P("data", "model"))
    )
    w = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
    run = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=RECIPE))
    program = run.lower(x, w).compile().as_text()
    assert program is not None
    assert "all-gather" not in program and "all-reduce" not in program


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        recipes.float8_tensorwise(),
        recipes.high_precision(),
        *(
            pytest.param(recipes.from_name(name), marks=pytest.mark.slow)
            for name in ("nvfp4", "float8_rowwise", "mxfp4_stochastic")
        ),
    ],
    ids=lambda recipe: recipe.name,
)
def test_explicit_sharding(recipe, arrays):
    """Sharding in types: forward and backward agree on where things lie."""
    mesh = mesh_of(AxisType.Explicit, "data")
    x, w, g = arrays
    options = {"key": jax.random.key(0)} if recipe.is_stochastic else {}
    run = quick(lambda *a, **options: value_and_grads(*a, recipe=recipe, **options))
    expected = run(x, w, g, **options)
    with jax.set_mesh(mesh):
        specs = P("data", None), P(None, "model"), P("data", "model")
        actual = run(*place(mesh, arrays, specs), **options)
    assert [result.sharding.spec for result in actual] == [
        P("data", "model"),
        P("data", None),
        P(None, "model"),
    ]
    if recipe == RECIPE:
        check(actual, expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_out_sharding(arrays):
    mesh = mesh_of(AxisType.Explicit, "data")
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x, w = place(mesh, arrays[:2], (P(), P()))
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
def test_out_sharding_of_a_sharded_sum(arrays, expected, spec):
    """k is sharded in both operands: the caller says where the sum goes, or JAX refuses it."""
    mesh = mesh_of(AxisType.Explicit, "data")
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x, w = place(mesh, arrays[:2], (P(None, "data"), P("data", None)))
        product = mx_jax.dot_general(x, w, dimensions, recipe=RECIPE, out_sharding=spec)
        row = mx_jax.dot_general(x[3], w, (((0,), (0,)), ((), ())), recipe=RECIPE, out_sharding=P())
        transposed = mx_jax.einsum("mk,kn->nm", x, w, recipe=RECIPE, out_sharding=P(None, *spec))
    assert jax.typeof(product).sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    assert jax.typeof(transposed).sharding.spec == P(None, *(spec or (None,)))
    check([product, row, transposed.T], [expected[0], expected[0][3], expected[0]])
