"""What four GPUs exchange for rows that go to their experts and back, with gradients.

    python tests/gpu/compile_experts.py sm_90a

A process of its own, as `compile_for` is. One line of JSON: for each kind of collective and dtype
the number of arrays and their bytes on each device. Counted in a compiled module, not measured.
"""

import functools
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from tests.gpu.compile_for import GPUS, Gpu
from tests.sharding.collectives import collectives

P = PartitionSpec
DEVICES, TOKENS, FEATURES, UNITS = 4, 256, 512, 1024


def program(gpu: Gpu) -> str:
    """The optimized module: two experts a device."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.description(), topology=f"1x1x{DEVICES}"
    )
    devices = topologies.make_mesh(topology, (DEVICES,), ("x",)).devices
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    multiply = functools.partial(
        mx_jax.expert_ragged_dot,
        axis_name="x",
        recipe=recipes.mxfp4(),
        capacity=TOKENS // DEVICES,
    )

    def step(x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return y, *pullback(g)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    shapes = (TOKENS, FEATURES), (2 * DEVICES, FEATURES, UNITS), (TOKENS, UNITS)
    place = NamedSharding(mesh, P("x"))
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((DEVICES * 2 * DEVICES,), jnp.int32, sharding=place)
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.default_device(mesh.devices.flat[0]),
    ):
        lowered = jax.jit(sharded).trace(*operands, sizes).lower(lowering_platforms=("cuda",))
        return str(lowered.compile().as_text())


if __name__ == "__main__":
    print(json.dumps(collectives(program(GPUS[sys.argv[1]]))))
