"""Weights packed ahead of time for GPU kernels: what they hold, and what is lowered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import MatmulCall, OperandType, PackCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.layouts import PackedWeights
from mx_jax.backends.target import Target
from mx_jax.formats import (
    MX_FORMATS,
    MXFP4,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXINT8,
    NVFP4,
    BlockFormat,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import lowered, needs_mosaic

pytestmark = needs_mosaic


def pack(w: MXArray, call: MatmulCall) -> PackedMXArray:
    weights = OperandType.of(w, call.rhs.axes)
    packing = PackCall(weights=weights, blocks=w.blocks)
    target = Target(platform="cuda", compute_capability=(9, 0))
    assert PALLAS_GPU.rejects(packing, target) is None
    packed = PALLAS_GPU.run(packing, w)
    assert isinstance(packed, PackedMXArray)
    assert packed.serves(call.rhs.axes.contracting, call.rhs.axes.batch)
    return packed


FORMATS = (*MX_FORMATS, NVFP4, MXFP4.with_block(48), MXFP8_E4M3.with_block(128))


@pytest.mark.slow(but="mxfp8_e5m2|nvfp4|mxfp6_e3m2|48")
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_packed_weights_are_the_mxarray(format: BlockFormat, rng: np.random.Generator):
    """Every code and scale, NaN among them, in any order of axes, stacked by vmap or not."""
    facts: dict[str, Any] = {"batch": (2,), "m": (1,), "n": (5, 26), "k": (2, 384)}
    case = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", rhs_k_first=True, **facts)
    _, w = case.operands(rng)
    assert isinstance(w, MXArray)
    codes = rng.integers(0, 2**format.element.bits, w.shape).astype(np.uint8)
    scales = rng.integers(0, 256, w.scales.shape).astype(np.uint8)
    w = dataclasses.replace(w, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    packed = pack(w, case.call)
    assert isinstance(packed.arrays, PackedWeights)
    assert (packed.shape, packed.blocks, packed.backend) == (w.shape, w.blocks, "pallas_gpu")
    for field in ("codes", "scales", "tensor_scale"):
        kept, expected = (getattr(each, field) for each in (packed.unpack(), w))
        assert (kept is None) == (expected is None)
        if expected is not None:
            # A stack has a tensor scale for each of its matrices.
            assert_bitwise_equal(kept, jnp.broadcast_to(expected, kept.shape), what=field)
    first = jax.tree.map(lambda leaf: leaf[0], packed)
    assert first.shape == w.shape[1:] and first.serves((0, 1), ())
    assert_bitwise_equal(first.unpack().codes, w.codes[0], what="codes of the first")
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
    assert stacked.shape == (2, *w.shape) and stacked.unpack().shape == (2, *w.shape)
    assert_bitwise_equal(stacked.unpack()[1].codes, w.codes, what="stacked codes")
    assert stacked.serves((2, 3), (0, 1)) and not stacked.serves((1, 2), (0,))


STORED_BITS = {MXFP4: 4.5, NVFP4: 5, MXFP6_E3M2: 8.5, MXFP8_E4M3: 8.5, MXINT8: 8.5}


def test_size_of_packed_weights():
    for format, bits in STORED_BITS.items():
        packed = jax.eval_shape(
            lambda w, format=format: PackedWeights.of(mx_jax.quantize(w, format)),
            jax.ShapeDtypeStruct((1, 128, 256), jnp.bfloat16),
        )
        assert 4 * (packed.codes.size + packed.scales.size) == 128 * 256 * bits / 8


def test_a_nan_among_the_codes_becomes_its_blocks_scale():
    w = mx_jax.quantize(jnp.ones((1, 2, 64)), "mxfp8_e5m2")
    codes = jnp.full(w.shape, 0x7C, jnp.uint8).at[0, 1, 40].set(0xFD)
    w = dataclasses.replace(w, codes=codes, scales=jnp.full((1, 2, 2), 127, jnp.uint8))
    halves = np.asarray(jax.jit(lambda w: PackedWeights.of(w).scales)(w)).view(jnp.bfloat16)
    first, second = halves.astype(np.float32).reshape(2, -1, 64, 2)[0, 0, :2]
    np.testing.assert_array_equal([first, second], [[1, 1], [1, np.nan]])


def test_lowers_where_integers_have_64_bits():
    """Several tiles along every axis, and several steps."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((200, 1024), (1024, 260)))

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        weights = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
        return mx_jax.matmul(x, weights, recipe=mx_jax.recipes.weight_only("mxfp4"))

    with jax.enable_x64(True):
        text = lowered(run, x, w)
    assert "mx_jax_wgmma_mxfp4" in text
