"""The layouts that GPU kernels read, without a GPU: packed weights, scaled operands, float16."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.calls import DequantizeCall, PackCall
from mx_jax.backends.pallas_gpu import backend_for, products
from mx_jax.backends.pallas_gpu.architecture import SM90, SM100, Architecture
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, ScaledOperand
from mx_jax.formats import MXFP4, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.testing.backend_suite import draw_any_codes
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import mostly_slow, needs_mosaic


def test_a_float16_is_two_bfloat16_of_its_sign():
    """Every one: so an infinite weight gives each part's product the same infinity, never NaN."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    parts = products._bfloat16_parts(jnp.asarray(every)[None, :, None])
    assert parts.dtype == jnp.bfloat16 and parts.shape == (1, 2 << 16, 1)
    high, low = np.asarray(parts, np.float64).reshape(2, -1)
    np.testing.assert_array_equal(high + low, every.astype(np.float64))
    known = ~np.isnan(every)
    for part in (high, low):
        np.testing.assert_array_equal(np.sign(part[known]), np.sign(every[known]))


PACKED = (*formats.MX_FORMATS, formats.NVFP4, MXFP4.with_block(48), MXFP8_E4M3.with_block(128))


def random_weights(
    rng: np.random.Generator, shape: tuple[int, ...], format: BlockFormat, blocks: Any = None
) -> MXArray:
    """Any code under any scale byte."""
    dtype, blocks = jnp.dtype("bfloat16"), blocks or ((-1, format.block[1]),)
    call = DequantizeCall(shape=shape, dtype=dtype, format=format, blocks=blocks)
    return draw_any_codes(rng, call)


@pytest.mark.parametrize("shape", mostly_slow([(1, 1, 1), (2, 130, 160)], (2, 130, 160)))
@pytest.mark.parametrize("format", mostly_slow(PACKED, MXFP4, MXFP6_E3M2), ids=str)
def test_packing_round_trips(
    format: formats.BlockFormat, shape: tuple[int, int, int], rng: np.random.Generator
):
    weights = random_weights(rng, shape, format)
    packed = jax.jit(PackedWeights.of)(weights)
    unpacked = jax.jit(lambda packed: packed.unpack())(packed)
    jax.tree.map(assert_bitwise_equal, unpacked, weights)


def test_size_of_packed_weights(rng: np.random.Generator):
    known = {MXFP4: 4.5, formats.NVFP4: 5, MXFP8_E4M3: 8.5, formats.MXINT8: 8.5}
    for format, bits in (known | {MXFP6_E3M2: 8.5}).items():
        packed = jax.eval_shape(PackedWeights.of, random_weights(rng, (1, 128, 256), format))
        assert 4 * (packed.codes.size + packed.scales.size) == 128 * 256 * bits / 8


def test_a_nan_among_the_codes_becomes_its_blocks_scale(rng: np.random.Generator):
    weights = random_weights(rng, (1, 2, 64), MXFP8_E5M2)
    weights = dataclasses.replace(weights, codes=jnp.full((1, 2, 64), 0x7C, jnp.uint8))
    one = jnp.full((1, 2, 2), 127, jnp.uint8)
    weights = dataclasses.replace(weights, codes=weights.codes.at[0, 1, 40].set(0xFD), scales=one)
    halves = np.asarray(jax.jit(lambda w: PackedWeights.of(w).scales)(weights)).view(jnp.bfloat16)
    first, second = halves.astype(np.float32).reshape(2, -1, 64, 2)[0, 0, :2]
    np.testing.assert_array_equal([first, second], [[1, 1], [1, np.nan]])


@needs_mosaic
@pytest.mark.parametrize(
    "which",
    mostly_slow(
        [(SM90, None, MXFP8_E5M2), (SM90, MXFP4, MXFP4), (SM100, NVFP4, NVFP4)],
        (SM90, None, MXFP8_E5M2),
        (SM100, NVFP4, NVFP4),
    ),
    ids=str,
)
def test_packed_weights_are_the_mxarray(
    which: tuple[Architecture, BlockFormat | None, BlockFormat], rng: np.random.Generator
):
    """Every code and scale, NaN among them, in any order of axes, stacked by vmap or not."""
    architecture, lhs, format = which
    facts: dict[str, Any] = {"batch": (2,), "m": (1,), "n": (5, 3), "k": (2, 64)}
    case = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", rhs_k_first=True, **facts)
    weights = case.call.rhs
    blocks = weights.axes.blocks(format)
    w = random_weights(rng, weights.shape, format, blocks)
    backend = backend_for(architecture=architecture)
    packed = backend.run(PackCall(weights=weights, blocks=blocks, lhs_format=lhs), w)
    assert packed.serves(weights.axes.contracting, weights.axes.batch)
    assert isinstance(packed.arrays, PackedWeights)
    assert (packed.shape, packed.blocks, packed.backend) == (w.shape, w.blocks, "pallas_gpu")
    for one, other in zip(*map(jax.tree.leaves, (packed.unpack(), w)), strict=True):
        # A stack has a tensor scale for each of its matrices.
        assert_bitwise_equal(one, jnp.broadcast_to(other, one.shape))
    first = jax.tree.map(lambda leaf: leaf[0], packed)
    assert first.shape == w.shape[1:] and first.serves((0, 1), ())
    assert_bitwise_equal(first.unpack().codes, w.codes[0], what="codes of the first")
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
    assert stacked.shape == (2, *w.shape) and stacked.unpack().shape == (2, *w.shape)
    assert_bitwise_equal(stacked.unpack()[1].codes, w.codes, what="stacked codes")
    assert stacked.serves((2, 3), (0, 1)) and not stacked.serves((1, 2), (0,))


# As tensor cores take both operands --------------------------------------------------------------


def test_layout_of_scales_is_what_the_docstring_says(rng: np.random.Generator):
    x = random_weights(rng, (1, 130, 640), MXFP8_E4M3)
    scales = np.asarray(x.scales)
    laid_out = ScaledOperand.of(x)
    assert laid_out.codes.shape == (1, 136, 768) and laid_out.scales.shape == (2, 6, 32, 16)
    bytes_ = np.asarray(laid_out.scales)
    for row, column in ((0, 0), (37, 5), (129, 19), (96, 3), (64, 4)):
        tile, (i, j) = row // 128, divmod(row % 128, 32)
        byte = bytes_[tile, column // 4, j, 4 * i + column % 4]
        assert byte == scales[0, row, column]
    assert bytes_[1, 0, 5, 0] == 0, "padding"


def test_fp4_takes_half_a_byte(rng: np.random.Generator):
    x = random_weights(rng, (1, 128, 256), MXFP4)
    codes = np.asarray(x.codes)
    laid_out = jax.jit(ScaledOperand.of)(x)
    assert laid_out.codes.nbytes == 128 * 256 // 2
    np.testing.assert_array_equal(laid_out.codes, codes[:, :, 0::2] | codes[:, :, 1::2] << 4)
    native = jax.jit(lambda laid_out: laid_out.elements)(laid_out)
    assert native.dtype == jnp.float4_e2m1fn
    np.testing.assert_array_equal(np.asarray(native).view(np.uint8), codes)
