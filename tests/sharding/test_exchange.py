"""Tokens sent to their experts as codes: what arrives, what moves, and what comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import mx_jax
from mx_jax.sharding import all_to_all, ppermute
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick
from tests.sharding.collectives import collectives

P = PartitionSpec
DEVICES, CAPACITY, FEATURES = 2, 32, 64

AXES = {"expert": DEVICES}

# Tokens `[sender, expert, capacity, k]`, an expert a device.
TOKENS = draw_few_octaves(np.random.default_rng(0), (DEVICES, DEVICES, CAPACITY, FEATURES))


def send_by(mesh: Mesh, *axes: int) -> Any:
    def run(x: Any) -> Any:
        return all_to_all(x, "expert", *axes)

    return quick(jax.shard_map(run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"])
def test_what_arrives(format: str, mesh: Mesh):
    x = mx_jax.quantize(TOKENS, format)
    program = send_by(mesh, 1, 0).lower(x).compile()
    moved, text = program(x), str(program.as_text())
    wanted = x.dequantize().reshape(1, DEVICES, DEVICES, CAPACITY, FEATURES)
    wanted = jnp.swapaxes(wanted[0], 0, 1).reshape(DEVICES**2, 1, CAPACITY, FEATURES)
    assert_bitwise_equal(moved.dequantize(), wanted)
    # Codes at their real width, and their scales.
    nbytes = {exchange.dtype: exchange.nbytes for exchange in collectives(text)}
    assert nbytes == {"u8": x.size // DEVICES * x.format.bits_per_element / 8}


def test_gradients_come_back_to_where_their_rows_were(mesh: Mesh):
    """Along other axes than they went."""
    x, g = TOKENS, np.float32(np.arange(TOKENS.size)).reshape(TOKENS.shape)

    def back(x: jax.Array, g: jax.Array) -> jax.Array:
        def forth(x: jax.Array) -> jax.Array | None:
            return all_to_all(mx_jax.quantize(x, "mxfp8_e4m3"), "expert", 1, 0).primal

        y, pullback = jax.vjp(forth, x)
        return pullback(g.reshape(y.shape))[0]

    run = jax.shard_map(back, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    # Rows of the cotangent lie as `test_what_arrives` says: by receiver, then by sender.
    np.testing.assert_array_equal(quick(run)(x, g), jnp.swapaxes(g, 0, 1))


@pytest.mark.parametrize(
    ("format", "axes", "shape", "message"),
    [
        ("mxfp4", (1, 0), (8, 64), "split_axis=1 .* block=32 along it; quantize along another"),
        ("mxfp4", (0, 1), (16, 64), "concat_axis=1"),
        ("mxfp4", (0, 0), (6, 64), r"shape=\(3, 64\) with split_axis=0 for 2 devices; pad it"),
    ],
)
def test_refusals(format: str, axes: Any, shape: Any, message: str, mesh: Mesh):
    with pytest.raises(ValueError, match=message):
        send_by(mesh, *axes)(mx_jax.quantize(jnp.ones(shape), format))


OTHERS = {
    "all_to_all": (
        lambda x: all_to_all(x, "expert", 0, 0),
        "all_to_all: needs an MXArray, got .*; jax.lax.all_to_all t",
    ),
    "ppermute": (
        lambda x: ppermute(x, "expert", []),
        "ppermute: needs an MXArray, got .*; jax.lax.ppermute t",
    ),
    "tensor scales": (
        lambda x: all_to_all(mx_jax.quantize(x, "nvfp4"), "expert", 0, 0).codes,
        "senders' tensor scales, got format=nvfp4; use",
    ),
}


@pytest.mark.parametrize(("run", "message"), OTHERS.values(), ids=OTHERS)
def test_other_operands_are_refused(run: Any, message: str, mesh: Mesh):
    run = jax.shard_map(run, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    with pytest.raises((TypeError, ValueError), match=message):
        run(jnp.ones((16, 64)))


@pytest.mark.slow(but="nvfp4")
@pytest.mark.parametrize(("format", "bits"), [("nvfp4", 4), ("mxfp8_e4m3", 8)])
def test_what_one_stage_hands_to_the_next(format: str, bits: int, mesh: Mesh):
    """Codes go on with their stage's tensor scale; the gradient comes back as it is."""
    x = TOKENS.reshape(DEVICES, -1, FEATURES) * np.array([1, 64], np.float32)[:, None, None]
    g = np.full_like(x, 3)

    def hand_on(x: jax.Array) -> jax.Array | None:
        return ppermute(mx_jax.quantize(x, format), "expert", [(0, 1)]).primal

    def both(x: jax.Array, g: jax.Array) -> Any:
        y, pullback = jax.vjp(hand_on, x)
        return y, *pullback(g)

    run = jax.shard_map(both, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    program = quick(run).lower(x, g).compile()
    y, bar = program(x, g)
    assert_bitwise_equal(y[1], mx_jax.quantize(x[0], format).dequantize())
    assert not np.any(y[0]) and (bar[0] == 3).all() and not np.any(bar[1])
    moved = {c.dtype: c.nbytes for c in collectives(str(program.as_text())) if "perm" in c.kind}
    block = 16 if format == "nvfp4" else 32
    extra = 4 if format == "nvfp4" else 0
    assert moved["u8"] == x[0].size * bits // 8 + x[0].size // block
    assert moved["f32"] == 4 * x[0].size + extra
