"""Bytes that each of eight devices receives for a product and its gradients, beside plain JAX's.

Every layout in every way to name a mesh, in float32 and bfloat16, read from the program
after XLA has partitioned it, on eight virtual CPU devices: counted, not measured. What follows
there is a backend's own; on CPUs it widens bfloat16 to float32. Where libtpu is, some of them in
bfloat16 for TPUs that are not there too, read from the final program.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from benchmarks import environment, report
from benchmarks.tpu_cost import ENVIRONMENT
from mx_jax import recipes
from mx_jax.sharding import Gather
from tests.sharding.collectives import partitioned, received

P = PartitionSpec
DEVICES, LAYERS = 8, 2
TOKENS, FEATURES, UNITS = 1024, 512, 768
DIMENSIONS = (((1,), (0,)), ((), ()))
PLAIN = "jax"
SQUARE = " with "  # between a recipe and its format of weights
SQUARES = ("mxfp8 with mxfp8_e4m3_2d", "mxfp4 with mxfp4_2d")
RECIPES = ("mxfp8", "mxfp4", "float8_rowwise", *SQUARES)
DTYPES = ("float32", "bfloat16")
WAYS = ("set_mesh", "no mesh", "with mesh", "explicit", "shard_map")
# Under "gather" the recipe says what is gathered; the mesh is in context, and its axes automatic.
TPUS, WAYS_OF_TPUS = ("v6e:2x2", "tpu7x:2x2x1"), ("gather", "no mesh", "explicit", "shard_map")
LAYOUTS_OF_TPUS = ("FSDP by k", "FSDP, scanned")
SIZE_OF_TPUS = 256  # tokens, features and units: libtpu takes many seconds for more


class Layout(NamedTuple):
    """Where input, kernel and product lie; their gradients lie there too.

    Attributes:
      x: `[tokens, features]`.
      w: `[features, units]`.
      y: `[tokens, units]`.
      moved: which operand shard_map gathers, along "data": "x", "w" or none.
      summed: along which mesh axis it adds up products, if it does; `moved` is "y" where it
        scatters them.
      layers: whether there are several, under `lax.scan`.
    """

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec
    moved: str = ""
    summed: str = ""
    layers: bool = False


# On a mesh of "data", 8, or 4 where there is "model" too, 2.
LAYOUTS = {
    "data": Layout(P("data"), P(), P("data")),
    "FSDP by k": Layout(P("data"), P("data"), P("data"), "w"),
    "FSDP by n": Layout(P("data"), P(None, "data"), P("data"), "w"),
    "FSDP, scanned": Layout(P("data"), P("data"), P("data"), "w", layers=True),
    "tensor, column": Layout(P(), P(None, "data"), P(None, "data")),
    "tensor, row": Layout(P(None, "data"), P("data"), P(), summed="data"),
    "sequence, column": Layout(P("data"), P(None, "data"), P(None, "data"), "x"),
    "sequence, row": Layout(P(None, "data"), P("data"), P("data"), "y", summed="data"),
    "FSDP, tensor column": Layout(P("data"), P("data", "model"), P("data", "model"), "w"),
    "FSDP, tensor row": Layout(P("data", "model"), P("model", "data"), P("data"), "w", "model"),
}


# Programs that are more than a product: in which ways there are.
EXPERTS = {"experts, no capacity": False, "experts, capacity": True}
MODEL = "language model"
OTHERS = dict.fromkeys(EXPERTS, ("shard_map",)) | {MODEL: ("set_mesh", "no mesh")}
VOCABULARY, TIME, HEADS = 256, 64, 8


class Case(NamedTuple):
    """One program: a layout, a way, a recipe's name or `PLAIN`, the operands' dtype, and whether
    sums are added up in float32."""

    layout: str
    way: str
    recipe: str
    dtype: str
    widened: bool = False


def cases(recipe: str) -> Iterator[Case]:
    """All of a recipe."""
    for layout, ways in (dict.fromkeys(LAYOUTS, WAYS) | OTHERS).items():
        for way in ways:
            yield from (Case(layout, way, recipe, dtype) for dtype in DTYPES)


def named(name: str) -> recipes.Recipe:
    """A recipe by its name, perhaps with a format of its weights."""
    base, _, weights = name.partition(SQUARE)
    recipe = recipes.from_name("high_precision" if base == PLAIN else base)
    return recipe.with_(weights=weights) if weights else recipe


def program(case: Case) -> str:
    """The module of a case as each device runs it, before what XLA does for one platform."""
    return partitioned(lowered(case, jax.devices()[:DEVICES]))


def lowered(case: Case, devices: Sequence[Any]) -> Any:
    """A case for these devices, which need not be there."""
    build = _language_model if case.layout == MODEL else _experts
    if case.layout in LAYOUTS:
        build = _product
    function, mesh, operands, places = build(case, devices)
    contexts = {"no mesh": contextlib.nullcontext(), "with mesh": mesh}
    with contexts.get(case.way) or jax.set_mesh(mesh):
        return jax.jit(function, out_shardings=places).lower(*operands)


def _mesh(devices: Sequence[Any], kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    types = (kind,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=types, devices=devices)


def _product(case: Case, devices: Sequence[Any]) -> tuple[Any, Mesh, Any, Any]:
    layout = LAYOUTS[case.layout]
    kind = AxisType.Explicit if case.way == "explicit" else AxisType.Auto
    model = {"model": 2} if "model" in str(layout) else {}
    mesh = _mesh(devices, kind, data=len(devices) // math.prod(model.values()), **model)
    units = FEATURES if layout.layers else UNITS
    stacked, kernels = layout.w, (FEATURES, units)
    if layout.layers:
        stacked, kernels = P(None, *layout.w), (LAYERS, *kernels)
    in_specs, out_specs = (layout.x, stacked, layout.y), (layout.y, layout.x, stacked)
    operands = [
        jax.ShapeDtypeStruct(shape, case.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(
            ((TOKENS, FEATURES), kernels, (TOKENS, units)), in_specs, strict=True
        )
    ]
    function: Any = step(case, layout)
    if case.way == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return function, mesh, operands, tuple(NamedSharding(mesh, spec) for spec in out_specs)


def _experts(case: Case, devices: Sequence[Any]) -> tuple[Any, Mesh, Any, Any]:
    """Rows to two experts a device and back, an even part of them for each expert."""
    mesh, n = _mesh(devices, data=len(devices)), len(devices)
    each = TOKENS // n // (2 * n)

    def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        if case.recipe != PLAIN:
            capacity = TOKENS // n**2 if EXPERTS[case.layout] else None
            how: dict[str, Any] = {"recipe": named(case.recipe), "capacity": capacity}
            return mx_jax.expert_ragged_dot(x, w, sizes, "data", **how)
        # By receiver, expert and row; then by expert, sender and row.
        x = lax.all_to_all(x.reshape(n, 2, each, -1), "data", 0, 0)
        x = x.swapaxes(0, 1).reshape(len(x) * 2 * each, -1)
        y = lax.ragged_dot(x, w, jnp.full(2, n * each))
        y = y.reshape(2, n, each, -1).swapaxes(0, 1)
        return lax.all_to_all(y, "data", 0, 0).reshape(len(x), -1)

    def step(x: jax.Array, w: jax.Array, g: jax.Array, sizes: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, w: multiply(x, w, sizes), x, w)
        return y, *pullback(g)

    place = NamedSharding(mesh, P("data"))
    shapes = (TOKENS, FEATURES), (2 * n, FEATURES, UNITS), (TOKENS, UNITS)
    operands = [jax.ShapeDtypeStruct(shape, case.dtype, sharding=place) for shape in shapes]
    operands.append(jax.ShapeDtypeStruct((2 * n**2,), jnp.int32, sharding=place))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return sharded, mesh, operands, place


def _language_model(case: Case, devices: Sequence[Any]) -> tuple[Any, Mesh, Any, Any]:
    """A loss and its gradients: examples/lm's blocks, float32 parameters where it puts them."""
    # Not for every case: orbax and optax take seconds.
    from benchmarks.language_model import WEIGHTS, Block

    mesh = _mesh(devices, data=len(devices) // 4, fsdp=2, model=2)
    recipe = named(case.recipe)
    dtype, key = jnp.dtype(case.dtype), jax.random.key(0)
    block = Block(time=TIME, heads=HEADS, layers=LAYERS, recipe=recipe, dtype=dtype)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["tokens"].astype(dtype)[tokens[:, :-1].reshape(-1)]
        for weights in params["blocks"]:
            x = block.apply({"params": weights}, x)
        logits = (x @ params["head"].astype(dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:].reshape(-1)
        ).mean()

    def place(path: Any, x: Any) -> Any:
        (spec,) = [WEIGHTS[e.key] for e in path if getattr(e, "key", None) in WEIGHTS] or [P()]
        # Of the model itself the first axis is that of scanned layers.
        spec = P(*spec[-x.ndim :]) if x.ndim > 1 else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    weights = jax.eval_shape(lambda: block.init(key, jnp.ones((TIME, FEATURES)))["params"])
    table = jax.ShapeDtypeStruct((VOCABULARY, FEATURES), jnp.float32)
    head = jax.ShapeDtypeStruct((FEATURES, VOCABULARY), jnp.float32)
    params = {"tokens": table, "blocks": [weights] * LAYERS, "head": head}
    params = jax.tree_util.tree_map_with_path(place, params)
    by_rows = NamedSharding(mesh, P(("data", "fsdp")))
    tokens = jax.ShapeDtypeStruct((TOKENS // TIME, TIME + 1), jnp.int32, sharding=by_rows)
    places = NamedSharding(mesh, P()), jax.tree.map(lambda x: x.sharding, params)
    return jax.value_and_grad(loss), mesh, (params, tokens), places


def step(case: Case, layout: Layout) -> Any:
    """A product, or layers of them, and its gradients."""
    multiply, options, inside = lax.dot_general, dict[str, Any](), case.way == "shard_map"
    if case.way == "explicit":
        options["out_sharding"] = layout.y
    if case.recipe != PLAIN:
        multiply, recipe = mx_jax.dot_general, named(case.recipe)
        if case.way in ("shard_map", "gather") and layout.moved in ("w", "x"):
            of_w = layout.moved == "w"
            gather = Gather("data", lhs=None if of_w else layout.x, rhs=layout.w if of_w else P())
            recipe = dataclasses.replace(recipe, gather=gather)
        if case.widened:
            recipe = dataclasses.replace(recipe, reduce_dtype=jnp.float32)
        options["recipe"] = recipe

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        if inside and case.recipe == PLAIN and layout.moved == "w":
            w = lax.all_gather(w, "data", axis=tuple(layout.w).index("data"), tiled=True)
        if inside and case.recipe == PLAIN and layout.moved == "x":
            x = lax.all_gather(x, "data", tiled=True)
        y = multiply(x, w, DIMENSIONS, **options)
        if not inside or not layout.summed:
            return y
        if layout.moved == "y":
            return lax.psum_scatter(y, layout.summed, tiled=True)
        return lax.psum(y, layout.summed)

    def layers(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (product(x, w), None), x, kernels)[0]

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(layers if layout.layers else product, x, w)
        return y, *pullback(g)

    return step


def counted(case: Case) -> Counter[tuple[str, str]]:
    """Bytes that each device receives, by kind of collective and dtype; of a loop, one turn's.

    Even rows of experts take one.
    """
    return received(program(case), DEVICES)


def cases_of_tpus(recipe: str) -> list[Case]:
    """Those of a recipe that are compiled for TPUs."""
    every = itertools.product(LAYOUTS_OF_TPUS, WAYS_OF_TPUS)
    return [Case(layout, way, recipe, "bfloat16") for layout, way in every]


def counted_on(name: str, case: Case) -> Counter[tuple[str, str]]:
    """As `counted`, on TPUs that are not there; of their final program."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return received(lowered(case, devices).compile().as_text(), len(devices))


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case of every recipe, a process with eight devices for each recipe; then TPUs."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    inherited = os.environ | {"JAX_PLATFORMS": "cpu"}
    measured: list[dict[str, Any]] = []
    for device in ("cpu", *options.tpus):
        variables = {"XLA_FLAGS": flags} if device == "cpu" else ENVIRONMENT
        for recipe in (PLAIN, *options.recipes):
            command = [sys.executable, "-m", "benchmarks.collectives", "--worker", device, recipe]
            done = subprocess.run(
                command, env=inherited | variables, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"collectives: {recipe} failed:\n{done.stderr[-3000:]}")
            measured += map(json.loads, done.stdout.splitlines())
    return measured


def _work(device: str, recipe: str) -> None:
    if device != "cpu":
        globals().update(dict.fromkeys(("TOKENS", "FEATURES", "UNITS"), SIZE_OF_TPUS))
    for case in cases(recipe) if device == "cpu" else cases_of_tpus(recipe):
        exchanged = counted(case) if device == "cpu" else counted_on(device, case)
        bytes_of = {" ".join(key): size for key, size in sorted(exchanged.items()) if size}
        row = {"device": device} | case._asdict()
        print(json.dumps(row | {"bytes": bytes_of, "total": sum(bytes_of.values())}), flush=True)


def sheets(rows: Sequence[dict[str, Any]]) -> list[report.Sheet]:
    """A table for each dtype: bytes over those of plain JAX, a column for each way."""
    key = ("device", *Case._fields[:4])
    totals = {tuple(row[name] for name in key): row["total"] for row in rows}
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    tables = []
    for device, dtype in dict.fromkeys((row["device"], row["dtype"]) for row in rows):
        of_cpus = device == "cpu"
        ways, what = (WAYS, f"{DEVICES} devices") if of_cpus else (WAYS_OF_TPUS, f"TPUs {device}")
        size, read = f"{SIZE_OF_TPUS} tokens, features and units", "libtpu's final programs"
        if of_cpus:
            size = f"{TOKENS} tokens, {FEATURES} features, {UNITS} units, as many rows an expert"
            read = "programs after partitioning"
        sheet = report.Sheet(
            f"{what}, bytes that each receives, {dtype}: {'; '.join(names[1:])}; over plain JAX",
            ["layout", *ways],
            notes=[f"{size}; forward and both gradients. Read from {read}, nothing measured."],
        )
        for layout in (*LAYOUTS, *OTHERS) if of_cpus else LAYOUTS_OF_TPUS:
            cells = []
            for way in ways:
                ratios = (
                    totals[device, layout, way, name, dtype]
                    / totals[device, layout, way, PLAIN, dtype]
                    for name in names[1:]
                    if (device, layout, way, name, dtype) in totals
                )
                cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
            sheet.rows.append([layout, *cells])
        tables.append(sheet)
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("collectives", __doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="beside plain JAX")
    here = TPUS if importlib.util.find_spec("libtpu") else ()
    parser.add_argument("--tpus", nargs="*", default=list(here), help="topologies, by libtpu")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        return _work(*options.worker)
    measured = rows(options)
    result = {"environment": environment.describe(), "rows": measured}
    report.publish("collectives", options, result, sheets(measured))
    return None


if __name__ == "__main__":
    main()
