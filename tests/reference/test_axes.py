"""Where blocks and mesh axes lie, by an operand's axes and types; nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mx_jax.axes import Axes
from mx_jax.codecs.explicit_axes import partitions, split_axes, vary_alike, varying
from mx_jax.formats import (
    FLOAT8_ROWWISE_E4M3,
    FLOAT8_TENSORWISE_E4M3,
    MXFP4,
    MXFP4_2D,
    NVFP4,
    WHOLE,
)
from tests.sharding.collectives import mesh_of

TWO_OF_EACH = Axes((0, 1), (2, 3), (4, 5))
K_FIRST = Axes((0, 1), (4, 5), (2, 3))


@pytest.mark.parametrize(
    ("format", "blocks", "k_first"),
    [
        (MXFP4, ((-1, 32),), ((-3, 32),)),
        (NVFP4, ((-1, 16),), ((-3, 16),)),
        (MXFP4_2D, ((-3, 32), (-1, 32)), ((-3, 32), (-1, 32))),
        (MXFP4.with_block(1), (), ()),
        (FLOAT8_ROWWISE_E4M3, ((-2, WHOLE), (-1, WHOLE)), ((-4, WHOLE), (-3, WHOLE))),
        (
            FLOAT8_TENSORWISE_E4M3,
            tuple((axis, WHOLE) for axis in range(-6, 0)),
            tuple((axis, WHOLE) for axis in range(-6, 0)),
        ),
    ],
)
def test_blocks(format, blocks, k_first):
    assert TWO_OF_EACH.blocks(format) == blocks
    assert K_FIRST.blocks(format) == k_first


def test_blocks_lie_along_the_last_axis_of_a_group():
    """Of three axes, and of one."""
    assert Axes.ordered(kept=3, contracting=3).blocks(MXFP4_2D) == ((-4, 32), (-1, 32))
    assert Axes.ordered().blocks(MXFP4_2D) == ((-2, 32), (-1, 32))


# Where split and joined axes lie, and what varies, as types say -----------------------------------


@pytest.mark.parametrize(
    ("shape", "spec", "pieces", "inside", "parts"),
    [
        # Blocks divide evenly over the devices, or do not, or there is one.
        ((8, 64), P("a", "b"), (8, 4, 16), (2,), ("a", "b", None)),
        ((8, 64), P("a", "b"), (8, 2, 32), (2,), ("a", None, None)),
        ((8, 64), P("a", "b"), (8, 1, 64), (2,), ("a", None, "b")),
        ((8, 64), P(None, ("a", "b")), (8, 8, 8), (2,), (None, ("a", "b"), None)),
        ((8, 64), P(None, ("a", "b")), (8, 4, 16), (2,), (None, None, None)),
        ((8, 64), P("a"), (2, 4, 2, 32), (1, 3), ("a", None, None, None)),
        ((8, 64), P(None, "a"), (8, 2, 32), (2,), (None, "a", None)),
        ((8, 64), P("b", "a"), (8, 64), (), ("b", "a")),
    ],
)
def test_split(shape, spec, pieces, inside, parts):
    mesh = mesh_of(AxisType.Explicit, a=2, b=4)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        out = jax.eval_shape(lambda x: split_axes(x, pieces, inside), x)
    assert (out.shape, tuple(partitions(out.sharding, len(out.shape)))) == (pieces, parts)


def test_operands_vary_along_the_axes_of_all():
    mesh = mesh_of(a=2, b=4)
    seen = []

    def shard(x, y, z):
        seen.append([varying(part) for part in (x, y, z)])
        alike = vary_alike((x, y, z))
        seen.append([varying(part) for part in alike])
        return alike[0]

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    specs = (P("a"), P(None, "b"), P())
    jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("a", "b")), x, x, x)
    assert seen[0] == [{"a"}, {"b"}, set()]
    assert seen[1] == [{"a", "b"}] * 3
