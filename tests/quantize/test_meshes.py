"""Random bits, codes and checkpoints do not depend on the mesh that they are made on."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from tests.sharding.collectives import mesh_of

X = (64, 256)
KEY = jax.random.key(7)


@pytest.fixture
def x(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.standard_normal(X), jnp.float32)


def test_each_shard_by_the_key_rule(x: jax.Array):
    """shard_map: fold in the axes that split the data, and no other."""

    def shard(x: jax.Array, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, jax.lax.axis_index("a"))
        return mx_jax.cast(x, "mxfp4", rounding="stochastic", key=key)

    # Along b the shards hold the same rows, and check_vma proves that they stay the same.
    specs = {"in_specs": (P("a"), P()), "out_specs": P("a")}
    split = jax.shard_map(shard, mesh=mesh_of(a=4, b=2), **specs)
    rows = jnp.broadcast_to(x[:1], X)
    parts = np.asarray(jax.jit(split)(rows, KEY)).reshape(4, X[0] // 4, X[1])
    for number, part in enumerate(parts):
        key = jax.random.fold_in(KEY, number)
        expected = mx_jax.cast(rows[: X[0] // 4], "mxfp4", rounding="stochastic", key=key)
        np.testing.assert_array_equal(part, expected)
        assert number == 0 or (part != parts[0]).any()


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_saved_on_one_mesh_restored_on_another(tmp_path: Path, x: jax.Array, format: str):
    """An MXArray through orbax: the same codes and scales, where the target says."""
    saved = {"kernel": mx_jax.quantize(x, format, axis=0), "bias": x[0]}
    before, after = mesh_of(a=2, b=4), mesh_of(a=4, b=2)
    place, spec_after = NamedSharding(before, P("a", "b")), P(None, "a")
    placed = {
        "kernel": mx_jax.sharding.device_put(saved["kernel"], place),
        "bias": jax.device_put(saved["bias"], NamedSharding(before, P())),
    }

    def wanted_at(leaf: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(after, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = mx_jax.sharding.spec_for(spec_after, format, axis=0)
    parts = [spec for spec in specs if spec is not None]
    leaves, tree = jax.tree.flatten(saved["kernel"])
    kernel = tree.unflatten([*map(wanted_at, leaves, parts)])
    like = {"kernel": kernel, "bias": wanted_at(saved["bias"], P())}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", placed)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "step", like)
    assert restored["kernel"].format == saved["kernel"].format
    for ours, wanted, theirs in zip(*map(jax.tree.leaves, (restored, like, saved)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding == wanted.sharding
