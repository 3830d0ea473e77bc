"""Experts on several devices: rows that come as codes give what one device with all gives."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.sharding import dispatch
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import slow
from tests.quick import quick, with_gradients
from tests.sharding.collectives import collectives, draw_all

P = PartitionSpec
DEVICES, EXPERTS, ROWS, FEATURES, UNITS = 4, 8, 24, 64, 32
# Rows of each device for each expert: none, most, all; the last device uses 21 of its 24 rows.
SIZES = np.array(
    [
        [1, 1, 16, 4, 1, 0, 0, 1],
        [0, 2, 5, 1, 9, 0, 0, 7],
        [0, 24, 0, 0, 0, 0, 0, 0],
        [0, 2, 0, 7, 3, 3, 6, 0],
    ],
    np.int32,
)
NVFP4_ROWS = recipes.nvfp4()
NVFP4_ROWS = dataclasses.replace(
    NVFP4_ROWS, name="nvfp4 rows", output=dataclasses.replace(NVFP4_ROWS.output, rhs=None)
)

AXES = {"expert": DEVICES}

# Rows of all devices, experts and a cotangent; products of them need no rounding.
ARRAYS = draw_all((DEVICES * ROWS, FEATURES), (EXPERTS, FEATURES, UNITS), (DEVICES * ROWS, UNITS))


def by_expert(sizes: np.ndarray) -> np.ndarray:
    """Which rows each expert gets, device after device."""
    ends = np.cumsum(sizes, axis=1)
    pieces = [
        device * ROWS
        + np.arange(ends[device, expert] - sizes[device, expert], ends[device, expert])
        for expert in range(EXPERTS)
        for device in range(DEVICES)
    ]
    return np.concatenate(pieces)


def on_devices(mesh: Mesh, function: Any, check_vma: bool = True) -> Any:
    return quick(
        jax.shard_map(
            function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma
        )
    )


@pytest.mark.parametrize(
    ("recipe", "check_vma"),
    [(recipes.mxfp4(), True), slow(recipes.mxfp6(), False)],
    ids=lambda value: getattr(value, "name", None),
)
def test_one_device_gives_the_same(recipe: Any, check_vma: bool, mesh: Mesh):
    x, w, g = ARRAYS
    ours = functools.partial(mx_jax.expert_ragged_dot, axis_name="expert", recipe=recipe)

    def alone(x, w, sizes):
        spec = recipe.output.lhs
        rows = mx_jax.quantize(x, spec.format, scale_rule=spec.scale_rule)
        return mx_jax.ragged_dot(rows, w, sizes, recipe=recipe)

    order = by_expert(SIZES)
    operands = x, w, g, SIZES.reshape(-1)
    program = on_devices(mesh, with_gradients(ours), check_vma).lower(*operands).compile()
    y, dx, dw = map(np.asarray, program(*operands))
    wanted = map(np.asarray, quick(with_gradients(alone))(x[order], w, g[order], SIZES.sum(0)))
    for one, other in zip((y[order], dx[order], dw), wanted, strict=True):
        assert_bitwise_equal(one + 0.0, other + 0.0)
    unused = np.setdiff1d(np.arange(len(x)), order)
    assert len(unused) and not y[unused].any() and not dx[unused].any()
    # A row's codes and scales are bytes side by side. y, its cotangent and dx move as values.
    bits = recipe.output.lhs.format.bits_per_element
    exchanges = [c for c in collectives(program.as_text()) if c.kind == "all-to-all"]
    # Of one turn, in which a device sends no more rows than it has.
    assert {c.dtype: c.nbytes for c in exchanges} == {
        "u8": ROWS * FEATURES * bits / 8,
        "f32": 4 * ROWS * (2 * UNITS + FEATURES),
    }


@pytest.mark.slow
def test_one_tensor_scale_for_all_rows(mesh: Mesh):
    """Rows of devices with far larger values have the scale of all."""
    x, w, _ = ARRAYS
    x = x * np.repeat(np.array([1, 1, 64, 4], np.float32), ROWS)[:, None]
    multiply = functools.partial(mx_jax.expert_ragged_dot, axis_name="expert", recipe=NVFP4_ROWS)
    y = on_devices(mesh, multiply)(x, w, SIZES.reshape(-1))
    order = by_expert(SIZES)
    rows = mx_jax.quantize(x[order], "nvfp4")
    alone = quick(lambda w, sizes: mx_jax.ragged_dot(rows, w, sizes, recipe=NVFP4_ROWS))
    wanted = alone(w, SIZES.sum(0))
    np.testing.assert_allclose(np.asarray(y)[order], wanted, rtol=1e-6, atol=1e-3)


def everyone(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` says, by all rows of all devices: CPUs have none."""
    me = lax.axis_index(axis_name)
    rows, starts, counts, places = (
        lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    for sender in range(DEVICES):
        index = jnp.arange(output.shape[0]) - places[sender, me]
        moved = jnp.take(rows[sender], starts[sender, me] + index, axis=0, mode="clip")
        inside = (
            (index >= 0) & (index < counts[sender, me]) & (counts[sender, me] == recv_sizes[sender])
        )
        output = jnp.where(inside[:, None], moved, output)
    return output


@pytest.mark.parametrize(("way", "capacity"), [("padded", None), ("padded", 8), ("ragged", 5)])
def test_there_and_back(
    way: str, capacity: int | None, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
):
    """Both ways to send; a capacity keeps a device's last rows for each other one at home."""
    if way == "ragged":
        monkeypatch.setattr(lax, "ragged_all_to_all", everyone)
        choose = lambda *operands, cpu, default: default(*operands)  # noqa: E731
        monkeypatch.setattr(lax, "platform_dependent", choose)

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        sent = dispatch(x, sizes, "expert", capacity=capacity)
        return sent.rows, sent.group_sizes, sent.send_back(sent.rows)

    program = on_devices(mesh, run, check_vma=False)
    x = np.arange(1, DEVICES * ROWS + 1, dtype=np.float32)[:, None]
    shuffled = np.roll(SIZES, 3, axis=1)
    for sizes in (SIZES, shuffled, np.zeros_like(SIZES)):
        rows, arrived, back = map(np.asarray, program(x, sizes.reshape(-1)))
        most = np.minimum(np.cumsum(sizes.reshape(DEVICES, DEVICES, -1), axis=2), capacity or ROWS)
        kept = np.diff(most, axis=2, prepend=0).reshape(SIZES.shape)
        starts = np.cumsum(sizes, axis=1) - sizes
        np.testing.assert_array_equal(arrived, kept.sum(0))
        pieces = [
            [x[d * ROWS + starts[d, e] :][: kept[d, e]] for d in range(DEVICES)]
            for e in range(EXPERTS)
        ]
        each = EXPERTS // DEVICES
        for d, arrived_rows in enumerate(np.split(rows, DEVICES)):
            wanted = np.concatenate([*itertools.chain(*pieces[d * each : (d + 1) * each])])
            np.testing.assert_array_equal(arrived_rows[: len(wanted)], wanted)
            assert not arrived_rows[len(wanted) :].any()
        sent = np.concatenate([*itertools.chain(*pieces)])
        np.testing.assert_array_equal(back, np.where(np.isin(x, sent), x, 0))


@pytest.mark.slow
def test_each_row_under_its_senders_scale(mesh: Mesh):
    """NVFP4 without an agreement: four bytes more a row."""
    x = np.random.default_rng(0).normal(size=(DEVICES * ROWS, 32)).astype(np.float32)
    x *= np.repeat(np.array([1, 100, 3, 7], np.float32), ROWS)[:, None]

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        tokens = mx_jax.quantize(x, "nvfp4")
        sent = dispatch(tokens, sizes, "expert")
        return sent.send_back(sent.rows.dequantize()), tokens.dequantize()

    sizes = np.full((DEVICES, EXPERTS), ROWS // EXPERTS, np.int32)
    back, wanted = on_devices(mesh, run)(x, sizes.reshape(-1))
    assert_bitwise_equal(back, wanted)


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (np.ones((8, 2, 2), np.float32), np.zeros(8, np.int32), r"rows.shape=\(2, 2, 2\)"),
        (np.ones((8, 2), np.float32), np.zeros(8, np.float32), "integer group_sizes"),
        (np.ones((8, 2), np.float32), np.zeros(12, np.int32), "got 3 group sizes for 4 devices"),
    ],
)
def test_refusals(rows: Any, sizes: Any, message: str, mesh: Mesh):
    run = lambda x, sizes: dispatch(x, sizes, "expert").rows  # noqa: E731
    with pytest.raises(ValueError, match=message):
        on_devices(mesh, run)(rows, sizes)


def test_what_cannot_be_sent(mesh: Mesh):
    sizes, x = np.zeros(EXPERTS * DEVICES, np.int32), np.ones((DEVICES * 64, 32), np.float32)

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        sent = dispatch(x, sizes, "expert")
        with pytest.raises(ValueError, match=r"needs a row for each .* got y.shape=\(3, 32\)"):
            sent.send_back(sent.rows[:3])
        with pytest.raises(ValueError, match=r"rows move one by one, got .* quantize along the la"):
            dispatch(mx_jax.quantize(x, "mxfp4", axis=0), sizes, "expert")
        with pytest.raises(ValueError, match="room for a row is needed, got capacity=0"):
            dispatch(x, sizes, "expert", capacity=0)
        return sent.group_sizes

    jax.eval_shape(
        jax.shard_map(run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")), x, sizes
    )


@pytest.mark.parametrize(
    ("capacity", "loops"), [(None, True), (ROWS // DEVICES + 1, True), (ROWS // DEVICES, False)]
)
def test_turns_are_as_many_as_rows_need(capacity: int | None, loops: bool, mesh: Mesh):
    """An even share moves in a turn: one turn, if rows are even, whatever room there is."""

    def run(x: jax.Array, sizes: jax.Array) -> Any:
        sent = dispatch(x, sizes, "expert", capacity=capacity)
        return sent.send_back(sent.rows), sent.route.most[None]

    program = on_devices(mesh, run)
    x = np.arange(1.0, DEVICES * ROWS + 1, dtype=np.float32)[:, None]
    even = np.full_like(SIZES, ROWS // EXPERTS)
    for sizes, most in ((even, ROWS // DEVICES), (SIZES, ROWS), (0 * even, 0)):
        _, moved = program(x, sizes.reshape(-1))
        np.testing.assert_array_equal(moved, min(most, capacity or ROWS))
    traced = program.trace(x, even.reshape(-1))
    assert ("while[" in str(traced.jaxpr)) is loops
    text = traced.lower().compile().as_text()
    # Whichever devices the rows are for, and however many: a turn's rows, there and back.
    assert [c.nbytes for c in collectives(text) if c.kind == "all-to-all"] == [2 * 4 * ROWS]
