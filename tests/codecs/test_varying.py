"""What differs from shard to shard, as types say; nothing is compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mx_jax.codecs.varying import vary_alike, varying


def test_operands_vary_along_the_axes_of_all():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
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


def test_nothing_varies_outside():
    x = jnp.ones(2)
    assert varying(x) == frozenset()
    assert vary_alike((x, x))[0] is x
