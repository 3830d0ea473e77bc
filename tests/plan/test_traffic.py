"""What a plan says moves is what XLA's programs of small steps move.

On CPU XLA writes reduce-scatter as all-reduce and a slice, and computes in float32.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.codecs import packing
from mx_jax.formats import MXFP4_2D, NVFP4
from mx_jax.plan.mesh import Setup
from mx_jax.plan.model import Linear, Model
from mx_jax.plan.traffic import COLLECTIVES, is_repeated, moved_bytes, movements, traffic
from mx_jax.recipes import high_precision

WIDTH, HIDDEN, LAYERS, TOKENS = 64, 256, 3, 512
UP = Linear(name="up", k=WIDTH, n=HIDDEN, split="column")
DOWN = Linear(name="down", k=HIDDEN, n=WIDTH, split="row", recomputed=False)
MODEL = Model(params=LAYERS * 2 * WIDTH * HIDDEN, layers=LAYERS, width=WIDTH, linears=(UP, DOWN))
POLICIES = {
    "none": None,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "save_quantized": mx_jax.save_quantized,
}
# In CPU's programs, and how many bytes an element has.
_COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all)\(")
_ARRAY = re.compile(r"(f32|u8)\[([\d,]*)\]")
_BYTES = {"f32": 4, "u8": 1}


def spec(setup: Setup, *parts: Any) -> NamedSharding:
    """A sharding along those of the named axes that the mesh has."""
    sizes = {name: getattr(setup, name) for name in ("data", "fsdp", "model")}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    given = (tuple(part) if isinstance(part, tuple) else (part,) for part in parts)
    return NamedSharding(
        mesh, PartitionSpec(*(tuple(name for name in part if name in sizes) for part in given))
    )


def compiled_step(setup: Setup) -> str:
    """The program of one step of `MODEL` without quantization."""
    between = spec(setup, ("data", "fsdp", *(("model",) if setup.sequence else ())), None)
    inside = spec(setup, ("data", "fsdp"), "model")
    pin = jax.lax.with_sharding_constraint

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        h = mx_jax.matmul(jnp.sin(pin(x, between)), up, recipe="high_precision")
        y = mx_jax.matmul(pin(jnp.sin(h), inside), down, recipe="high_precision")
        return pin(x + y, between), None

    if setup.remat != "none":
        block = jax.checkpoint(block, policy=POLICIES[setup.remat], prevent_cse=False)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jax.lax.scan(block, x, weights)[0].sum()

    stored = spec(setup, None, "fsdp", "model"), spec(setup, None, "model", "fsdp")
    weights = tuple(
        jax.ShapeDtypeStruct((LAYERS, own.k, own.n), jnp.float32, sharding=sharding)
        for own, sharding in zip((UP, DOWN), stored, strict=True)
    )
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32, sharding=between)
    step = jax.jit(jax.grad(loss), out_shardings=stored)
    return str(step.lower(weights, x).compile().as_text())


def collectives(program: str) -> collections.Counter[tuple[str, str]]:
    """Bytes of what collectives give, by kind and pass. A loop's body is there once."""
    found = collections.Counter()
    for line in program.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        during = "backward" if "transpose(" in line else "forward"
        for dtype, shape in _ARRAY.findall(match[1]):
            size = math.prod(int(length) for length in shape.split(",") if length)
            found[match[2], during] += size * _BYTES[dtype]
    return found


def planned(setup: Setup) -> collections.Counter[tuple[str, str]]:
    """The same of a plan: one block's."""
    found = collections.Counter()
    for own in movements(setup):
        kind = "all-gather" if own.collective == "all-gather" else "all-reduce"
        for linear in MODEL.linears:
            if own.split in (None, linear.split):
                size, _ = moved_bytes(own, linear, setup, high_precision())
                size = round(size)
                found[kind, own.during] += size
                if is_repeated(own, linear, setup, high_precision()):
                    found[kind, "backward"] += size
    return found


FLOAT32 = functools.partial(Setup, tokens=TOKENS, dtype=np.dtype(np.float32))


@pytest.mark.by_default("8x1x1|1x8x1 False none|1x1x8 True none|2x2x2")
@pytest.mark.parametrize(
    "setup",
    [
        FLOAT32(data=8),
        FLOAT32(fsdp=8),
        FLOAT32(model=8),
        FLOAT32(model=8, sequence=True),
        FLOAT32(data=2, fsdp=2, model=2),
        FLOAT32(fsdp=8, remat="nothing_saveable"),
        FLOAT32(fsdp=4, model=2, remat="save_quantized"),
        FLOAT32(model=8, sequence=True, remat="nothing_saveable"),
    ],
    ids=lambda own: f"{own.data}x{own.fsdp}x{own.model} {own.sequence} {own.remat}",
)
def test_values_are_what_the_program_moves(setup: Setup):
    found = collectives(compiled_step(setup))
    assert found == planned(setup)
    assert found.total() > 0


@pytest.mark.by_default("forward-mxfp8|backward-mxfp4|forward-nvfp4")
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("during", ["forward", "backward"])
def test_codes_are_what_the_program_gathers(name: str, during: str):
    """The weight of `up`, stored in shards, quantized there, gathered packed."""
    setup, recipe = Setup(fsdp=2, tokens=TOKENS), recipes.from_name(name)
    stored, whole = spec(setup, "fsdp", None), spec(setup, None, None)
    operand = (recipe.fwd if during == "forward" else recipe.dlhs).rhs
    assert operand is not None
    pin = jax.lax.with_sharding_constraint

    def gather(x: jax.Array) -> jax.Array:
        return pin(pin(x, stored), whole)

    def gathered(w: jax.Array) -> jax.Array:
        axis = 0 if during == "forward" else 1
        x = mx_jax.quantize(w, operand.format, axis=axis, scale_rule=operand.scale_rule)
        codes = packing.unpack(gather(x.packed_codes), operand.format.element.bits, UP.n)
        return dataclasses.replace(x, codes=codes, scales=gather(x.scales)).dequantize()

    w = jax.ShapeDtypeStruct((UP.k, UP.n), jnp.float32, sharding=stored)
    with mx_jax.only_backend("reference"):
        program = str(jax.jit(gathered, out_shardings=whole).lower(w).compile().as_text())
    (own,) = (own for own in movements(setup) if own.operands and own.during == during)
    size, is_coded = moved_bytes(own, UP, setup, recipe)
    assert is_coded
    assert collectives(program)["all-gather", "forward"] == size


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


def test_blocks_that_would_straddle_shards_move_as_values():
    """k = 64 in 4 shards of 16: half a block of 32, one of NVFP4's."""
    setup = Setup(fsdp=4, tokens=TOKENS)
    forward, backward, _ = movements(setup)
    for name, in_codes in (("mxfp4", False), ("nvfp4", True)):
        recipe = recipes.from_name(name)
        assert moved_bytes(forward, UP, setup, recipe)[1] is in_codes
        # n lies whole on each device.
        assert moved_bytes(backward, UP, setup, recipe)[1] is True
    square = dataclasses.replace(
        recipes.mxfp4(),
        dlhs=recipes.MatmulSpec(lhs=recipes.operand("mxfp4"), rhs=recipes.operand(MXFP4_2D)),
    )
    assert moved_bytes(backward, UP, setup, square)[1] is False


def test_only_named_axes_move_codes():
    recipe = recipes.from_name("nvfp4")
    sizes: dict[Any, Any] = {}
    for axes in ((), ("fsdp",), ("fsdp", "model")):
        setup = Setup(fsdp=2, model=2, tokens=TOKENS, sequence=True, codes=frozenset(axes))
        rows = traffic(MODEL, setup, recipe)
        sizes[axes] = {row.movement.axis for row in rows if row.as_codes}
    assert sizes == {(): set(), ("fsdp",): {"fsdp"}, ("fsdp", "model"): {"fsdp", "model"}}


def test_a_cotangent_is_gathered_once_for_each_orientation():
    setup = Setup(model=2, tokens=TOKENS, sequence=True, codes=frozenset({"model"}))
    (own,) = (own for own in movements(setup) if own.tensor == "output gradient")
    size, is_coded = moved_bytes(own, DOWN, setup, recipes.from_name("nvfp4"))
    assert is_coded and size == 2 * TOKENS * WIDTH * NVFP4.bits_per_element / 8
    # Two of eight bits are more than one of bfloat16.
    values = TOKENS * WIDTH * 2
    assert moved_bytes(own, DOWN, setup, recipes.mxfp8()) == (values, False)


def test_a_rematerialized_block_gathers_codes_again():
    """And not what only the residual stream reads, nor values that both passes share."""
    for remat, repeats in (("none", 1), ("nothing_saveable", 2)):
        setup = Setup(fsdp=2, tokens=TOKENS, remat=remat)
        forward, *_ = traffic(MODEL, setup, recipes.mxfp4())
        values, *_ = traffic(MODEL, setup, high_precision())
        share = LAYERS / 2
        assert forward.bytes == share * (repeats + 1) * UP.params * 4.25 / 8
        assert values.bytes == share * 2 * UP.params * 2


def test_unknown_collectives_do_not_pass(monkeypatch: pytest.MonkeyPatch):
    rows: Mapping[str, int] = COLLECTIVES
    every = Setup(data=2, fsdp=2, model=2, tokens=TOKENS, sequence=True)
    assert {own.collective for own in movements(every)} <= set(rows)
