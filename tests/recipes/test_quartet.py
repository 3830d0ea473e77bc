"""Quartet step by step as its paper has it, in NumPy, against the recipe: forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe
from mx_jax.sharding.movement import Gather
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

P = PartitionSpec
# Its kept operands and its turning back with nothing drawn.
NEAREST = recipes.quartet().with_(rounding="nearest", name="quartet, nearest")
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def draw(m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [m, k], w [k, n], g [m, n]."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n), (m, n)))
    return x, w, g


def blocks(x: np.ndarray, axis: int) -> np.ndarray:
    """`[rows, blocks, 32]` along an axis, padded with zeros."""
    rows = np.moveaxis(x, axis, -1)
    rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % 32)])
    return rows.reshape(rows.shape[0], -1, 32)


def back(found: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(found.reshape(found.shape[0], -1), -1, axis)


def turn(x: np.ndarray, axis: int) -> np.ndarray:
    """x H / sqrt(32) in blocks along an axis; its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return back(
        (blocks(x, axis).astype(np.float64) @ matrix / np.sqrt(32)).astype(np.float32), axis
    )


def forward_cast(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Values to nearest under a power of two near 2.92 / 6 standard deviations; which fit."""
    rows = blocks(x, axis)
    spread = 2.92247856 / 6 * rows.std(-1, keepdims=True) + 1e-8
    scale = np.exp2(np.floor(np.log2(spread)))
    over = rows / scale
    nearest = np.clip(over, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return back(nearest * scale, axis), back(np.abs(over) < 6, axis)


def backward_cast(x: np.ndarray, axis: int, key: jax.Array) -> np.ndarray:
    """Three quarters of the values, rounded at random under FLOOR's power of two, times 4/3."""
    rows = blocks(x, axis)
    scale = np.exp2(np.floor(np.log2(np.abs(rows).max(-1, keepdims=True))) - 2) * (4 / 3)
    over = rows / scale
    low = np.minimum(np.searchsorted(GRID, np.abs(over), side="right") - 1, 6)
    part = (np.abs(over) - GRID[low]) / (GRID[low + 1] - GRID[low])
    # With the library's own draws of sixteen bits.
    bits = np.asarray(jax.random.bits(key, x.shape, jnp.uint16)).astype(np.int32)
    up = np.floor(part * 65536) + blocks(bits, axis) >= 65536
    return back(np.sign(over) * GRID[low + up] * scale, axis)


def by_hand(x: np.ndarray, w: np.ndarray, g: np.ndarray, key: jax.Array) -> list[np.ndarray]:
    """Output, grad_input, grad_weight: y = X W^T of turned and quantized X and W; both gradients
    multiply X and W as they were there, turned along the other axis; masks; turned back."""
    keys = [jax.random.split(jax.random.fold_in(key, product), 3) for product in (1, 2)]
    left, x_fits = forward_cast(turn(x, 1), 1)
    right, w_fits = forward_cast(turn(w, 0), 0)
    y = left @ right
    dx = backward_cast(turn(g, 1), 1, keys[0][0]) @ backward_cast(turn(right, 1), 1, keys[0][1]).T
    # The library's product is x^T g: x draws first.
    dw = backward_cast(turn(left, 0), 0, keys[1][0]).T @ backward_cast(turn(g, 0), 0, keys[1][1])
    assert 0.01 < 1 - x_fits.mean() < 0.2 and 0.01 < 1 - w_fits.mean() < 0.2
    return [y, turn(dx * x_fits, 1)[:, : x.shape[1]], turn(dw * w_fits, 0)[: w.shape[0]]]


def run(recipe: Recipe, x: Any, w: Any, g: Any, key: Any = None) -> tuple[jax.Array, ...]:
    y, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
    return y, *pullback(g)


@pytest.mark.slow
def test_gradients_of_quartet_ii_are_right_on_average():
    """Of what the output's product took: 99.9 % intervals of 32 draws (3.63 standard errors)."""
    arrays, keys = draw(64, 128, 64), jax.random.split(jax.random.key(1), 32)
    recipe = recipes.quartet_ii()
    exact = mx_jax.inspect.passes(recipe)["quartet_ii, forward alone"]
    drawn = quick(jax.vmap(lambda key: run(recipe, *arrays, key)[1:]))(keys)
    expected = quick(lambda *a: run(exact, *a)[1:])(*arrays)
    for found, value in zip(drawn, expected, strict=True):
        value = np.asarray(value, np.float64)
        slopes = np.einsum("dij,ij->d", np.asarray(found, np.float64), value) / np.sum(value**2)
        half = 3.63 * slopes.std(ddof=1) / np.sqrt(32)
        assert abs(slopes.mean() - 1) < half < 0.02, (slopes.mean(), half)


def test_weights_that_are_constants_of_the_program():
    """XLA computes what depends on them alone when it compiles, by an evaluator of its own."""
    x, w, _ = draw(4, 64, 32)
    key, recipe = jax.random.key(0), recipes.quartet()
    with mx_jax.only_backend("reference"):
        inside = jax.jit(lambda x: mx_jax.matmul(x, w, recipe=recipe, key=key))(x)
        given = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key))(x, w)
    np.testing.assert_allclose(inside, given, rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module")
def nearest() -> tuple[jax.Array, ...]:
    return quick(run, static_argnums=0)(NEAREST, *draw(64, 80, 32))


@pytest.mark.parametrize(
    "shape",
    [pytest.param((64, 96, 32), marks=pytest.mark.slow, id="whole"), (48, 80, 56)],
    ids=str,
)
def test_by_hand(shape: tuple[int, int, int]):
    arrays, key = draw(*shape), jax.random.key(3)
    actual = quick(run, static_argnums=0)(recipes.quartet(), *arrays, key)
    for name, own, other in zip(
        ("output", "grad_input", "grad_weight"), actual, by_hand(*arrays, key), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=3e-5, err_msg=name)


def test_what_is_kept(nearest):
    """Codes, scales and a bit an element; without the mask no bits."""

    def kept(recipe: Recipe) -> dict[tuple[int, ...], str]:
        x, w, _ = draw(64, 80, 32)
        _, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w)
        return {leaf.shape: str(leaf.dtype) for leaf in jax.tree.leaves(pullback)}

    codes = {(64, 96): "uint8", (64, 3): "uint8", (96, 32): "uint8", (3, 32): "uint8"}
    bits = {(64, 12): "uint8", (96, 4): "uint8"}
    assert kept(NEAREST) == codes | bits
    assert kept(NEAREST.with_(mask_clipped=False)) == codes


def vmapped(x, w, g):
    return [
        one[1]
        for one in jax.vmap(lambda *a: run(NEAREST, *a))(
            *(jnp.stack([a + 1, a]) for a in (x, w, g))
        )
    ]


def scanned_and_rematerialized(x, w, g):
    @jax.checkpoint
    def layer(x, w):
        return x, mx_jax.matmul(x, w, recipe=NEAREST)

    y, pullback = jax.vjp(lambda x, w: jax.lax.scan(layer, x, w[None])[1][0], x, w)
    return y, *pullback(g)


def on_shards(x, w, g):
    """Two shares of 32 tokens, a block each: JAX adds the cotangent of what both share."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tokens, specs = P("data"), (P("data"), P(), P("data"))
    step = jax.shard_map(
        lambda *a: run(NEAREST, *a), mesh=mesh, in_specs=specs, out_specs=(tokens, tokens, P())
    )
    return step(x, w, g)


@pytest.mark.parametrize("transformation", [vmapped, scanned_and_rematerialized, on_shards])
def test_transformations(transformation, nearest):
    actual = quick(transformation)(*draw(64, 80, 32))
    for own, other in zip(actual, nearest, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_remat_casts_once_where_codes_are_kept(nearest):
    """With the library's policy the backward pass reads codes and mask, and casts no operand."""

    def text(policy) -> str:
        layer = jax.checkpoint(lambda x, w: mx_jax.matmul(x, w, recipe=NEAREST), policy=policy)
        x, w, g = draw(64, 80, 32)
        return str(jax.make_jaxpr(lambda x, w: jax.vjp(layer, x, w)[1](g))(x, w))

    with mx_jax.only_backend("reference"):
        kept, again = (
            text(policy).count("name=mx_jax.quantized")
            for policy in (mx_jax.save_quantized, jax.checkpoint_policies.nothing_saveable)
        )
    assert kept < again


@pytest.mark.slow
@pytest.mark.parametrize("residuals", ["quantized", "primal"])
def test_explicit_sharding(residuals: str, nearest):
    """k on two devices: gradients lie where their operands do, whatever was kept."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    recipe = NEAREST.with_(residuals=residuals)
    specs = P("data", "model"), P("model", None), P("data", None)
    with jax.set_mesh(mesh):
        x, w, g = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(draw(64, 80, 32), specs, strict=True)
        )
        found = quick(run, static_argnums=0)(recipe, x, w, g)
    assert [a.sharding.spec for a in found] == [P("data", None), *specs[:2]]
    for own, other in zip(found[: 1 if residuals == "primal" else 3], nearest, strict=False):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_a_group_on_two_devices_is_refused(side: str):
    spec, axis = (P(None, "fsdp"), 1) if side == "lhs" else (P("fsdp", None), 0)
    given = {"lhs": P(), "rhs": P()} | {side: spec}
    recipe = NEAREST.with_(gather=Gather("fsdp", **given))
    step = jax.shard_map(
        lambda *a: run(recipe, *a)[0],
        mesh=jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,)),
        in_specs=(*given.values(), P()),
        out_specs=P(),
        check_vma=False,
    )
    message = r"keeps what each device transforms, but a group of Hadamard 32, fixed signs would"
    message += rf".* along axis={axis}, got shard size=40 along"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, *draw(64, 80, 32))


@pytest.mark.slow
def test_ragged_groups_are_products_of_their_own():
    sizes, (x, w, g) = (32, 8), draw(40, 80, 32)
    experts = np.stack([w, w[::-1]])

    @quick
    def ragged(x, experts, g):
        _, pullback = jax.vjp(
            lambda x, w: mx_jax.ragged_dot(x, w, sizes, recipe=NEAREST), x, experts
        )
        return pullback(g)

    @quick
    def dense(x, experts, g):
        parts = [
            run(NEAREST, x[a:b], experts[i], g[a:b]) for i, (a, b) in enumerate(((0, 32), (32, 40)))
        ]
        return jnp.concatenate([part[1] for part in parts]), jnp.stack([part[2] for part in parts])

    for own, other in zip(ragged(x, experts, g), dense(x, experts, g), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_square_blocks_are_turned_anew():
    """Codes that lie along both axes can be reused, but not where a product transforms them."""
    backward = {"transform": recipes.quartet().fwd.transform}
    recipe = recipes.mxfp4().with_(
        weights="mxfp4_2d", residuals="quantized", dlhs=backward, name="square"
    )
    x, w, g = draw(32, 32, 32)
    dx = quick(run, static_argnums=0)(recipe, x, w, g)[1]
    plain = recipe.with_(residuals="primal")
    values = mx_jax.quantize(w.T, "mxfp4_2d", scale_rule="even").dequantize().T
    assert_bitwise_equal(dx, quick(run, static_argnums=0)(plain, x, values, g)[1])


def test_watched_errors_are_of_operands_as_they_came(nearest):
    """The exact gradient is turned back as the recipe's own is: their distance is its error."""
    x, w, g = draw(64, 80, 32)
    with mx_jax.inspect.capture(stats=("error",)) as records:
        jax.block_until_ready(quick(lambda *a: run(NEAREST, *a))(x, w, g))
    found = {
        record.tag.product: record.stats["error"]
        for record in records.all()
        if record.tag.side is None
    }
    left, right = forward_cast(turn(x, 1), 1)[0], forward_cast(turn(w, 0), 0)[0]
    exact = turn(g @ right.T, 1)[:, :80], turn(left.T @ g, 0)[:80]
    for name, value, own in zip(("grad_input", "grad_weight"), exact, nearest[1:], strict=True):
        error = np.linalg.norm(np.asarray(own) - value) / np.linalg.norm(value)
        assert found[name] == pytest.approx(error, rel=1e-4), name
