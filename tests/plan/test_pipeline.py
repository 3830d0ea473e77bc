"""What a plan says of a pipeline is what the loop of a small one moves."""

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.plan.step import Model, Setup, memory, traffic
from mx_jax.sharding import Gather, ppermute
from tests.plan.test_traffic import FLOAT32, MODEL, TOKENS, UP, WIDTH, exchanged, spec
from tests.quick import quick


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
