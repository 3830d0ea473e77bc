"""What a plan says moves is what XLA's programs of small steps move."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.formats import MXFP4_2D
from mx_jax.plan.step import (
    AXES,
    COLLECTIVES,
    Linear,
    Model,
    Setup,
    is_repeated,
    memory,
    moved_bytes,
    movements,
    traffic,
)
from mx_jax.recipes import high_precision
from mx_jax.sharding import Gather, dispatch, ppermute
from tests.quick import quick
from tests.sharding.collectives import collectives as exchanged
from tests.sharding.collectives import partitioned, received

WIDTH, HIDDEN, LAYERS, TOKENS = 64, 256, 3, 512
UP = Linear(name="up", k=WIDTH, n=HIDDEN, split="column")
DOWN = Linear(name="down", k=HIDDEN, n=WIDTH, split="row", recomputed=False)
MODEL = Model(params=LAYERS * 2 * WIDTH * HIDDEN, layers=LAYERS, width=WIDTH, linears=(UP, DOWN))
POLICIES = {
    "none": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "save_quantized": mx_jax.save_quantized,
}


def spec(setup: Setup, *parts: Any, devices: Any = None) -> NamedSharding:
    """A sharding along those of the named axes that the mesh has."""
    sizes = {name: getattr(setup, name) for name in AXES}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    given = (tuple(part) if isinstance(part, tuple) else (part,) for part in parts)
    return NamedSharding(
        mesh, PartitionSpec(*(tuple(name for name in part if name in sizes) for part in given))
    )


def step_program(setup: Setup, recipe: recipes.Recipe, devices: Any = None) -> str:
    """The program of one step of `MODEL` on each device: of this process, or GPUs'."""
    place = functools.partial(spec, setup, devices=devices)
    between = place(("data", "fsdp", *(("model",) if setup.sequence else ())), None)
    inside = place(("data", "fsdp"), "model")
    pin = jax.lax.with_sharding_constraint

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        h = mx_jax.matmul(jnp.sin(pin(x, between)), up, recipe=recipe)
        y = mx_jax.matmul(pin(jnp.sin(h), inside), down, recipe=recipe)
        return pin(x + y, between), None

    if setup.remat != "none":
        block = jax.checkpoint(block, policy=POLICIES[setup.remat], prevent_cse=False)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(block, x, weights)[0].sum()

    stored = place(None, "fsdp", "model"), place(None, "model", "fsdp")
    weights = tuple(
        jax.ShapeDtypeStruct((LAYERS, own.k, own.n), setup.dtype, sharding=sharding)
        for own, sharding in zip((UP, DOWN), stored, strict=True)
    )
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), setup.dtype, sharding=between)
    step = jax.jit(jax.grad(loss), out_shardings=stored).trace(weights, x)
    return partitioned(step.lower(lowering_platforms=devices and ("cuda",)))


def planned(setup: Setup, recipe: recipes.Recipe) -> collections.Counter[tuple[str, str]]:
    """Bytes that a device receives for one block, by kind and dtype."""
    found = collections.Counter()
    for row in traffic(MODEL, setup, recipe):
        dtype = "u8" if row.as_codes else "bf16"
        found[row.movement.collective, dtype] += round(row.bytes / LAYERS)
    return found


BFLOAT16 = functools.partial(Setup, tokens=TOKENS)
FLOAT32 = functools.partial(Setup, tokens=TOKENS, dtype=np.dtype(np.float32))


SETUPS = (
    BFLOAT16(data=8),
    BFLOAT16(fsdp=8),
    BFLOAT16(model=8),
    BFLOAT16(model=8, sequence=True),
    BFLOAT16(data=2, fsdp=2, model=2),
    BFLOAT16(fsdp=8, remat="nothing_saveable"),
    BFLOAT16(fsdp=4, model=2, remat="save_quantized"),
    BFLOAT16(model=8, sequence=True, remat="nothing_saveable"),
)


@pytest.mark.slow(but="mxfp8-(1x8x1 False nothing|1x1x8 True none|2x2x2)|high.*4x2")
@pytest.mark.parametrize(
    "setup", SETUPS, ids=lambda own: f"{own.data}x{own.fsdp}x{own.model} {own.sequence} {own.remat}"
)
@pytest.mark.parametrize("name", ["high_precision", "mxfp8"])
def test_a_plan_is_what_the_program_moves(name: str, setup: Setup):
    check(setup, recipes.from_name(name))


def check(setup: Setup, recipe: recipes.Recipe, devices: Any = None) -> None:
    """In bfloat16, with shards that cut blocks: there maxima are exchanged besides."""
    found = received(step_program(setup, recipe, devices), setup.devices)
    wanted = planned(setup, recipe)
    maxima = sum(found.pop(("all-reduce", dtype), 0) for dtype in ("s16", "s32"))
    assert found.keys() == wanted.keys() and found.total() > 0
    for key, size in wanted.items():
        # Devices that share a block have its scale already.
        assert found[key] == size or (maxima and found[key] == pytest.approx(size, rel=0.02)), key
    assert maxima <= 0.05 * found.total()


EXPERTS = {"experts": 8, "experts_per_token": 2}
EXPERT_UP = dataclasses.replace(UP, **EXPERTS)
EXPERT_DOWN = dataclasses.replace(DOWN, recomputed=True, **EXPERTS)


def experts_step(setup: Setup, recipe: recipes.Recipe) -> str:
    """The program of layers of experts and their gradients, rows spread evenly over devices."""

    def gathering(*parts: Any) -> recipes.Recipe:
        return recipe.with_(gather=Gather("fsdp", rhs=PartitionSpec(None, *parts)))

    def layer(x: jax.Array, weights: Any, chosen: jax.Array) -> tuple[jax.Array, None]:
        up, down, given = weights
        order = jnp.argsort(chosen.reshape(-1))
        rows, spec = x[order // chosen.shape[1]], recipe.fwd.lhs
        if spec is not None:
            rows = mx_jax.quantize(rows, spec.format, scale_rule=spec.scale_rule)
        sizes = jnp.bincount(chosen.reshape(-1), length=EXPERT_UP.experts)
        sent = dispatch(rows, sizes, "expert", capacity=len(order) // setup.expert)
        h = mx_jax.ragged_dot(sent.rows, up, sent.group_sizes, recipe=gathering("fsdp", None))
        h = mx_jax.ragged_dot(jnp.sin(h), down, sent.group_sizes, recipe=gathering(None, "fsdp"))
        h = jax.lax.psum(h, "model") if setup.model > 1 else h
        y = sent.send_back(h)[jnp.argsort(order)].reshape(*chosen.shape, -1)
        return x + (y * given[..., None]).sum(1), None

    if setup.remat != "none":
        layer = jax.checkpoint(layer, policy=POLICIES[setup.remat], prevent_cse=False)

    def layers(x: jax.Array, weights: Any, chosen: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, own: layer(x, own, chosen), x, weights)[0]

    tokens, given = spec(setup, ("fsdp", "expert")), spec(setup, None, ("fsdp", "expert"))
    up = spec(setup, None, "expert", "fsdp", "model")
    down = spec(setup, None, "expert", "model", "fsdp")
    places = tokens, (up, down, given), tokens
    specs = jax.tree.map(lambda own: own.spec, places)
    sharded = jax.shard_map(layers, mesh=tokens.mesh, in_specs=specs, out_specs=specs[0])
    sizes = (LAYERS, EXPERT_UP.experts)
    shape = jax.ShapeDtypeStruct
    weights = (
        shape((*sizes, EXPERT_UP.k, EXPERT_UP.n), jnp.float32, sharding=up),
        shape((*sizes, EXPERT_DOWN.k, EXPERT_DOWN.n), jnp.float32, sharding=down),
        shape((LAYERS, TOKENS, 2), jnp.float32, sharding=given),
    )
    x = shape((TOKENS, WIDTH), jnp.float32, sharding=tokens)
    chosen = shape((TOKENS, 2), jnp.int32, sharding=tokens)
    step = jax.grad(lambda *operands: sharded(*operands).sum(), (0, 1))
    return str(quick(step).lower(x, weights, chosen).compile().as_text())


@pytest.mark.parametrize(
    ("recipe", "remat", "model"),
    [(recipes.mxfp6(), "nothing_saveable", 1), (recipes.mxfp4(), "save_quantized", 2)],
    ids=lambda own: str(getattr(own, "name", own)),
)
@pytest.mark.slow
def test_experts_are_sent_what_is_planned(recipe: recipes.Recipe, remat: str, model: int):
    """Along `model` each expert is split, and the sums of its parts are added before they go."""
    setup = FLOAT32(fsdp=2, expert=4 // model, model=model, remat=remat)
    wanted = collections.Counter()
    for own in movements(setup):
        for linear in (EXPERT_UP, EXPERT_DOWN):
            if own.is_of(linear):
                size, is_coded = moved_bytes(own, linear, setup, recipe)
                shares = setup.fsdp if own.collective == "reduce-scatter" else 1
                times = 2 if is_repeated(own, linear, setup, recipe) else 1
                wanted[own.collective, "u8" if is_coded else "f32"] += round(times * size / shares)
    found = {
        (kind, dtype): nbytes
        for kind, dtype, _, nbytes in exchanged(experts_step(setup, recipe))
        if dtype != "s32"
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "ratio"), [("mxfp8", 0.516), ("mxfp6", 0.391), ("mxfp4", 0.266), ("nvfp4", 0.281)]
)
def test_ratios_to_bfloat16(name: str, ratio: float):
    setup = Setup(fsdp=2, tokens=TOKENS)
    for own in movements(setup):
        if own.operands:
            ours, _ = moved_bytes(own, UP, setup, recipes.from_name(name))
            theirs, _ = moved_bytes(own, UP, setup, high_precision())
            assert ours / theirs == pytest.approx(ratio, abs=1e-3)


def test_the_ring_and_the_rest_of_the_model():
    """A device receives what it lacks; embedding and head are gathered, summed and never coded."""
    setup = Setup(fsdp=4, tokens=TOKENS)
    more = dataclasses.replace(MODEL, params=MODEL.params + 1000)
    for recipe in (high_precision(), recipes.mxfp4()):
        for own, other in zip(
            traffic(MODEL, setup, recipe), traffic(more, setup, recipe), strict=True
        ):
            assert other.bytes - own.bytes == pytest.approx(1000 * 2 * 3 / 4)
    (summed,) = traffic(MODEL, Setup(data=4, tokens=TOKENS), high_precision())
    assert COLLECTIVES["all-reduce"] == 2
    assert summed.bytes == MODEL.params * 2 * 2 * 3 / 4


def test_blocks_of_experts_that_would_straddle_shards_move_as_values():
    """k = 64 in 4 shards of 16: half a block of 32, one of NVFP4's. Others move as codes."""
    setup = Setup(fsdp=4, tokens=TOKENS)
    forward, backward, _ = movements(setup)
    for name, in_codes in (("mxfp4", False), ("nvfp4", True)):
        recipe = recipes.from_name(name)
        assert moved_bytes(forward, EXPERT_UP, setup, recipe)[1] is in_codes
        assert moved_bytes(forward, UP, setup, recipe)[1] is True
        # n lies whole on each device.
        assert moved_bytes(backward, EXPERT_UP, setup, recipe)[1] is True
    square = dataclasses.replace(
        recipes.mxfp4(),
        dlhs=recipes.MatmulSpec(lhs=recipes.operand("mxfp4"), rhs=recipes.operand(MXFP4_2D)),
    )
    assert moved_bytes(backward, EXPERT_UP, setup, square)[1] is False


def test_a_rematerialized_block_gathers_codes_again():
    """And not what only the residual stream reads, nor values that both passes share."""
    for remat, repeats in (("none", 1), ("nothing_saveable", 2)):
        setup = Setup(fsdp=2, tokens=TOKENS, remat=remat)
        forward, *_ = traffic(MODEL, setup, recipes.mxfp4())
        values, *_ = traffic(MODEL, setup, high_precision())
        share = LAYERS / 2
        assert forward.bytes == share * (repeats + 1) * UP.params * 4.25 / 8
        assert values.bytes == share * 2 * UP.params * 2


# Pipelines -------------------------------------------------------------------------------------


def pipeline_step(setup: Setup, recipe: recipes.Recipe, as_codes: bool) -> str:
    """The program of two blocks in two stages and its gradients, microbatch after microbatch."""
    stages, count = setup.pipe, setup.microbatches
    recipe = recipe.with_(gather=Gather("fsdp", rhs=PartitionSpec("fsdp", None)))

    def hand_on(y: jax.Array) -> jax.Array | None:
        pairs = [(stage, stage + 1) for stage in range(stages - 1)]
        if not as_codes:
            return jax.lax.ppermute(y, "pipe", pairs)
        own = recipe.fwd.lhs
        coded = mx_jax.quantize(y, own.format, scale_rule=own.scale_rule)
        return ppermute(coded, "pipe", pairs).primal

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        # [microbatches, tokens, width] of a device, and its stage's part of the weight.
        is_first = jax.lax.axis_index("pipe") == 0

        def step(arrived: jax.Array, own: jax.Array) -> Any:
            h = jnp.where(is_first, own, arrived)
            y = h + jnp.sin(mx_jax.matmul(jnp.sin(h), w[0], recipe=recipe))
            return hand_on(y), y

        waiting = jnp.zeros((stages - 1, *x.shape[1:]), x.dtype)
        start = jax.lax.pcast(jnp.zeros_like(x[0]), ("pipe",), to="varying")
        return jax.lax.scan(step, start, jnp.concatenate([x, waiting]))[1]

    tokens, stored = spec(setup, None, "fsdp"), spec(setup, "pipe", "fsdp")
    mapped = jax.shard_map(
        run,
        mesh=tokens.mesh,
        in_specs=(tokens.spec, stored.spec),
        out_specs=spec(setup, "pipe", "fsdp").spec,
    )
    shape = (count, TOKENS // count, WIDTH)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=tokens)
    w = jax.ShapeDtypeStruct((stages, WIDTH, WIDTH), jnp.float32, sharding=stored)
    step = jax.grad(lambda w, x: mapped(x, w).sum())
    return str(quick(step).lower(w, x).compile().as_text())


@pytest.mark.slow(but="False")
@pytest.mark.parametrize("as_codes", [False, True])
def test_a_pipeline_moves_what_is_planned(as_codes: bool):
    """The loop's body is there once: what a microbatch moves."""
    square = dataclasses.replace(UP, n=WIDTH)
    model = Model(params=2 * square.params, layers=2, width=WIDTH, linears=(square,))
    codes = frozenset({"fsdp", "pipe"} if as_codes else {"fsdp"})
    setup, recipe = FLOAT32(pipe=2, fsdp=2, microbatches=4, codes=codes), recipes.mxfp4()
    wanted = collections.Counter()
    for row in traffic(model, setup, recipe):
        own, size = row.movement, getattr(setup, row.movement.axis)
        received = row.bytes / setup.microbatches
        if own.axis == "fsdp":
            # What a gather gives is all of it, and a scattered sum is a part.
            received *= size / (size - 1) / (size if own.collective == "reduce-scatter" else 1)
        wanted[own.collective, "u8" if row.as_codes else "f32"] += round(received)
    found = {
        (kind, dtype): nbytes
        for kind, dtype, _, nbytes in exchanged(pipeline_step(setup, recipe, as_codes))
    }
    assert found == wanted


def test_more_stages_and_microbatches():
    """Weights move for each microbatch, sums along data once, activations as often as tokens."""

    def bytes_of(**sizes: Any) -> dict[tuple[str, str], float]:
        rows = traffic(MODEL, Setup(fsdp=2, data=2, tokens=TOKENS, **sizes), recipes.mxfp4())
        return {(row.movement.axis, row.movement.tensor): row.bytes for row in rows}

    alone, piped = bytes_of(), bytes_of(pipe=3, microbatches=4)
    assert piped["fsdp", "weight gradient"] == 4 / 3 * alone["fsdp", "weight gradient"]
    assert piped["data", "weight gradient"] == alone["data", "weight gradient"] / 3
    handed = TOKENS / 4 * WIDTH * 2
    assert piped["pipe", "block input"] == piped["pipe", "block input gradient"] == handed


def test_what_a_stage_keeps():
    """Its blocks, and residuals of all microbatches, or of as many as there are stages."""
    recipe, sizes = recipes.mxfp8(), {"tokens": 12 * TOKENS, "remat": "nothing_saveable"}
    whole = memory(MODEL, Setup(**sizes), recipe)
    for schedule, kept in (("gpipe", 12), ("1f1b", 3)):
        stage = memory(MODEL, Setup(pipe=3, microbatches=12, schedule=schedule, **sizes), recipe)
        assert stage.parameters == whole.parameters / 3
        assert stage.residuals == whole.residuals / 3 * kept / 12
