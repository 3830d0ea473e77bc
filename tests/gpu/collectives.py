"""What several GPUs exchange for a product and its gradients, beside the bfloat16 product's.

    python tests/gpu/collectives.py sm_90a

A process of its own, as `compile_for` is. One line of JSON for each case: its layout, recipe, how
the mesh was told, whether gradients are taken, and for each kind of collective and dtype the number
of arrays and their bytes on each device. Counted in modules compiled for four GPUs, not measured.
"""

import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.sharding import Gather
from tests.gpu.compile_for import GPUS, Gpu
from tests.sharding.collectives import collectives

P = PartitionSpec
DEVICES, TOKENS, FEATURES, UNITS = 4, 256, 512, 1024
DIMENSIONS = (((1,), (0,)), ((), ()))


class Layout(NamedTuple):
    """Where input, kernel and product lie; their gradients lie there too."""

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec


LAYOUTS = {
    "data": Layout(P("x", None), P(None, None), P("x", None)),
    "FSDP, k": Layout(P("x", None), P("x", None), P("x", None)),
    "FSDP, n": Layout(P("x", None), P(None, "x"), P("x", None)),
    "tensor, column": Layout(P(None, None), P(None, "x"), P(None, "x")),
    "tensor, row": Layout(P(None, "x"), P("x", None), P(None, None)),
    "sequence, column": Layout(P("x", None), P(None, "x"), P(None, "x")),
    "sequence, row": Layout(P(None, "x"), P("x", None), P("x", None)),
}


class Case(NamedTuple):
    """One program: `how` is "auto", "explicit" or "shard_map"; "lax" is no recipe. What is
    `recomputed` is a layer under `jax.checkpoint`."""

    layout: str
    recipe: str
    how: str = "auto"
    gather: bool = False
    gradients: bool = True
    recomputed: bool = False


def program(gpu: Gpu, case: Case) -> str:
    """The optimized module of a case."""
    layout = LAYOUTS.get(case.layout, LAYOUTS["data"])
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=gpu.description(), topology=f"1x1x{DEVICES}"
    )
    devices = topologies.make_mesh(topology, (DEVICES,), ("x",)).devices
    kind = AxisType.Explicit if case.how == "explicit" else AxisType.Auto
    mesh = Mesh(devices, ("x",), axis_types=(kind,))
    if case.layout == "experts":
        return _compiled(*_experts(case, mesh), devices)
    function: Any = _function(case, layout)
    results = (layout.y, layout.x, layout.w)
    if not case.gradients:
        results = results[:1]
    if case.how == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=tuple(layout), out_specs=results)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(
            ((TOKENS, FEATURES), (FEATURES, UNITS), (TOKENS, UNITS)), layout, strict=True
        )
    ]
    places = tuple(NamedSharding(mesh, spec) for spec in results)
    return _compiled(jax.jit(function, out_shardings=places), operands, mesh, devices)


def _compiled(function: Any, operands: Any, mesh: Mesh, devices: Any) -> str:
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        jax.default_device(devices.flat[0]),
    ):
        text = function.trace(*operands).lower(lowering_platforms=("cuda",)).compile().as_text()
    assert text is not None
    return text


def _experts(case: Case, mesh: Mesh) -> tuple[Any, Any, Mesh]:
    """Rows dispatched to two experts a device, multiplied and sent back, with gradients."""
    multiply = functools.partial(
        mx_jax.expert_ragged_dot,
        axis_name="x",
        recipe=recipes.from_name(case.recipe),
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
    return jax.jit(sharded), [*operands, sizes], mesh


def _function(case: Case, layout: Layout) -> Any:
    options: dict[str, Any] = {"out_sharding": layout.y} if case.how == "explicit" else {}
    multiply: Any = lax.dot_general
    if case.recipe != "lax":
        multiply, recipe = mx_jax.dot_general, recipes.from_name(case.recipe)
        if case.gather:
            lhs = layout.x if case.layout == "sequence, column" else None
            gather = Gather("x", lhs=lhs, rhs=layout.w if lhs is None else P())
            recipe = recipe.with_(gather=gather)
        options["recipe"] = recipe

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply(x, w, DIMENSIONS, **options)

    def recomputed(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x, w: jax.nn.relu(layer(jax.nn.relu(x), w)))(x, w)

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(recomputed if case.recomputed else layer, x, w)
        return (y, *pullback(g)) if case.gradients else (y,)

    return step


def cases() -> Iterator[Case]:
    """Every layout beside lax; FSDP gathered as codes, in every way that a mesh is told of."""
    for layout in LAYOUTS:
        for how in ("auto", "explicit"):
            for recipe in ("lax", "mxfp8"):
                yield Case(layout, recipe, how)
    yield Case("FSDP, k", "mxfp4")
    for recipe in ("lax", "mxfp8"):
        yield Case("FSDP, k", recipe, recomputed=True)
    for recipe in ("mxfp8", "mxfp6", "mxfp4", "nvfp4"):
        yield Case("FSDP, k", recipe, gather=True, gradients=False)
        yield Case("FSDP, k", recipe, gather=True)
    for how in ("auto", "explicit", "shard_map"):
        yield Case("FSDP, n", "mxfp4", how, gather=True)
    yield Case("FSDP, k", "nvfp4", "shard_map", gather=True)
    yield Case("sequence, column", "mxfp4", gather=True, gradients=False)
    yield Case("experts", "mxfp4", "shard_map")


if __name__ == "__main__":
    for one in cases():
        print(json.dumps([*one, collectives(program(GPUS[sys.argv[1]], one))]), flush=True)
