"""Sharded operands, under jit and under shard_map: the bits of the unsharded result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick

P = PartitionSpec
RECIPE = recipes.mxfp4()


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two operands and a cotangent; products of them need no rounding."""
    rng = np.random.default_rng(0)
    shapes = ((64, 128), (128, 64), (64, 64))
    x, w, g = (draw_few_octaves(rng, shape) for shape in shapes)
    return x, w, g


def value_and_grads(x, w, g, recipe=RECIPE, **options):
    product, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, **options), x, w)
    return product, *pullback(g)


@pytest.fixture(scope="module")
def expected(arrays) -> list[jax.Array]:
    return quick(value_and_grads)(*arrays)


def check(actual, expected) -> None:
    for name, left, right in zip(("product", "dx", "dw"), actual, expected, strict=True):
        assert_bitwise_equal(np.asarray(left) + 0.0, np.asarray(right) + 0.0, what=name)


@pytest.mark.by_default(r"^P\('data',\)|^P\(None, 'data'")
@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        (P("data"), P(None, "model")),
        (P("data", "model"), P("model")),
        # Four ways along k: each device holds exactly one block.
        (P(None, "data"), P("data", "model")),
        # More devices than blocks along k: blocks are cut between devices.
        (P(None, ("data", "model")), P(("data", "model"))),
    ],
    ids=str,
)
def test_sharded_operands(mesh: Mesh, arrays, expected, x_spec, w_spec):
    x, w, g = arrays
    x = jax.device_put(x, NamedSharding(mesh, x_spec))
    w = jax.device_put(w, NamedSharding(mesh, w_spec))
    check(quick(value_and_grads)(x, w, g), expected)


def test_sharded_mxarray(mesh: Mesh, arrays, expected):
    x, w, _ = arrays
    kernel = mx_jax.quantize(w, "mxfp4", axis=0, scale_rule="even")
    kernel = jax.device_put(kernel, NamedSharding(mesh, P("model", "data")))
    product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=RECIPE))(x, kernel)
    assert_bitwise_equal(np.asarray(product) + 0.0, np.asarray(expected[0]) + 0.0)


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


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh: Mesh, arrays, expected, check_vma: bool):
    """Data parallel: a share of the tokens each, all of the weight; dw is summed over devices."""

    def local(x, w, g):
        product, dx, dw = value_and_grads(x, w, g)
        # With vma, JAX itself sums the cotangent of what all devices share.
        return product, dx, dw if check_vma else jax.lax.psum(dw, "model")

    specs = (P("model"), P(), P("model"))
    shards = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=(P("model"), P("model"), P()),
        check_vma=check_vma,
    )
    # Two shares of 32 tokens, one block each: so dw is the same sum of the same casts.
    check(quick(shards)(*arrays), expected)


@pytest.mark.by_default("mxfp4")
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
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x, w, g = arrays
    options = {"key": jax.random.key(0)} if recipe.is_stochastic else {}
    run = quick(lambda *a, **options: value_and_grads(*a, recipe=recipe, **options))
    expected = run(x, w, g, **options)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("data", None)))
        w = jax.device_put(w, NamedSharding(mesh, P(None, "model")))
        g = jax.device_put(g, NamedSharding(mesh, P("data", "model")))
        actual = run(x, w, g, **options)
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
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, P())) for a in arrays[:2])
        for recipe in (RECIPE, recipes.high_precision()):
            product = mx_jax.dot_general(
                x, w, dimensions, recipe=recipe, out_sharding=P("data", "model")
            )
            assert product.sharding.spec == P("data", "model")
            product = mx_jax.einsum("mk,kn->nm", x, w, recipe=recipe, out_sharding=P("model"))
            assert product.sharding.spec == P("model", None)
            product = mx_jax.matmul(x, w, recipe=recipe, out_sharding=P(None, "model"))
            assert product.sharding.spec == P(None, "model")
            row = mx_jax.matmul(x[0], w[None], recipe=recipe, out_sharding=P(None, "data"))
            assert row.shape == (1, w.shape[1]) and row.sharding.spec == P(None, "data")


@pytest.mark.by_default("model")
@pytest.mark.parametrize("spec", [P(), P("model")], ids=str)
def test_out_sharding_of_a_sharded_sum(arrays, expected, spec):
    """k is sharded in both operands: the caller says where the sum goes, or JAX refuses it."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    dimensions = (((1,), (0,)), ((), ()))
    with jax.set_mesh(mesh):
        x = jax.device_put(arrays[0], NamedSharding(mesh, P(None, "data")))
        w = jax.device_put(arrays[1], NamedSharding(mesh, P("data", None)))
        product = mx_jax.dot_general(x, w, dimensions, recipe=RECIPE, out_sharding=spec)
        row = mx_jax.dot_general(x[3], w, (((0,), (0,)), ((), ())), recipe=RECIPE, out_sharding=P())
        turned = mx_jax.einsum("mk,kn->nm", x, w, recipe=RECIPE, out_sharding=P(None, *spec))
    assert product.sharding.spec == P(*spec, *(None,) * (2 - len(spec)))
    assert turned.sharding.spec == P(None, *(spec or (None,)))
    for actual, wanted in ((product, expected[0]), (row, expected[0][3]), (turned.T, expected[0])):
        assert_bitwise_equal(np.asarray(actual) + 0.0, np.asarray(wanted) + 0.0)
