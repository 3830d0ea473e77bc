"""Random bits, codes and checkpoints do not depend on the mesh that they are made on."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import recipes
from mx_jax.reference import hadamard

X = (64, 256)
KEY = jax.random.key(7)
# Shapes of meshes of axes a and b, and how x lies there.
MESHES = [
    ((8, 1), P(None, "a")),
    ((2, 4), P("a", "b")),
    ((4, 2), P(("b", "a"), None)),
]


def place(x: Any, shape: tuple[int, int], spec: P) -> Any:
    mesh = jax.make_mesh(
        shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: np.prod(shape)]
    )
    return jax.device_put(x, NamedSharding(mesh, spec))


@pytest.fixture
def x(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.standard_normal(X), jnp.float32)


def rounded(x: jax.Array, key: jax.Array) -> Any:
    rows = mx_jax.quantize(x, "nvfp4", rounding="stochastic", key=key)
    columns = mx_jax.quantize(x, "mxfp4", axis=0, rounding="stochastic", key=key)
    return rows, columns


def signs(x: jax.Array, key: jax.Array) -> jax.Array:
    transform = hadamard.Hadamard(size=32, signs=None)
    return hadamard.apply(x, hadamard.draw_signs(transform, key), -1)


@pytest.mark.by_default("shape1")
@pytest.mark.parametrize(("shape", "spec"), MESHES)
@pytest.mark.parametrize("function", [rounded, signs])
def test_the_same_bits_on_any_mesh(x: jax.Array, function: Any, shape: Any, spec: P):
    run = jax.jit(lambda x, key: function(x, key))
    expected, found = run(x, KEY), run(place(x, shape, spec), KEY)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert len(ours.sharding.device_set) == np.prod(shape)


@pytest.mark.slow
def test_a_product_and_its_gradients_round_alike(x: jax.Array, rng: np.random.Generator):
    """MXFP4's products are exact sums: what differs would be its random bits."""
    w = jnp.asarray(rng.standard_normal((X[1], 32)), jnp.float32)

    @jax.jit
    def step(x: jax.Array, w: jax.Array) -> Any:
        recipe = recipes.mxfp4_backward()
        y, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=KEY), x, w)
        return pullback(jnp.ones_like(y))

    expected = step(x, w)
    found = step(place(x, (2, 4), P("a", None)), place(w, (2, 4), P("b", "a")))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_each_shard_by_the_key_rule(x: jax.Array):
    """shard_map: fold in the axes that split the data, and no other."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def shard(x: jax.Array, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, jax.lax.axis_index("a"))
        return mx_jax.cast(x, "mxfp4", rounding="stochastic", key=key)

    # Along b the shards hold the same rows, and check_vma proves that they stay the same.
    split = jax.shard_map(shard, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    rows = jnp.broadcast_to(x[:1], X)
    found = np.asarray(jax.jit(split)(rows, KEY)).reshape(4, X[0] // 4, X[1])
    for number, part in enumerate(found):
        key = jax.random.fold_in(KEY, number)
        expected = mx_jax.cast(rows[: X[0] // 4], "mxfp4", rounding="stochastic", key=key)
        np.testing.assert_array_equal(part, expected)
        assert number == 0 or (part != found[0]).any()


@pytest.mark.by_default("mxfp4")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_saved_on_one_mesh_restored_on_another(tmp_path: Path, x: jax.Array, format: str):
    """An MXArray through orbax: the same codes and scales, where the target says."""
    saved = {"kernel": mx_jax.quantize(x, format, axis=0), "bias": x[0]}
    before, after = ((2, 4), P("a", "b")), ((4, 2), P(None, "a"))

    def placed(tree: Any, where: tuple[tuple[int, int], P]) -> Any:
        def lies(leaf: jax.Array) -> jax.Array:
            # One number for the whole tensor, and what is no matrix, is on all devices.
            return place(leaf, where[0], where[1] if leaf.ndim == 2 and leaf.size > 1 else P())

        return jax.tree.map(lies, tree)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", placed(saved, before))
        checkpointer.wait_until_finished()
        like = placed(jax.tree.map(jnp.zeros_like, saved), after)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = checkpointer.restore(tmp_path / "step", target)
    assert restored["kernel"].format == saved["kernel"].format
    for ours, wanted, theirs in zip(*map(jax.tree.leaves, (restored, like, saved)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == wanted.sharding
