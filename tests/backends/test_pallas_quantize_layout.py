"""The GPU's quantizing kernel without running it: calls, tiles, layouts, exact arithmetic."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, quantize, views
from mx_jax.backends.pallas_gpu.views import Tile
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4
from mx_jax.testing.cases import QuantizeCase
from tests.backends.mosaic import needs_mosaic
from tests.backends.test_pallas_decode import of_threads

H200 = Target(platform="cuda", compute_capability=(9, 0))
NEW = (0, 12, 0)


def call_of(format: formats.BlockFormat = MXFP8_E4M3, **facts: Any) -> QuantizeCall:
    return QuantizeCase(**{"format": format, "shape": (64, 96), "dtype": "bfloat16"} | facts).call


def both_of(*axes: int, **facts: Any) -> QuantizeBothCall:
    first, second = (call_of(axis=axis, **facts) for axis in axes)
    return QuantizeBothCall(first=first, second=second)


FNUZ = dataclasses.replace(MXFP8_E4M3, element=formats.E4M3FNUZ)
NV_E4M3 = dataclasses.replace(NVFP4, element=formats.E4M3)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        *((call_of(format, dtype=d), None) for format in formats.MX_FORMATS for d in ("float16",)),
        (call_of(NVFP4, shape=(7,)), None),
        (call_of(axis=0, block_size=16, shape=(0, 3, 1)), None),
        (both_of(-2, -1), None),
        (
            dataclasses.replace(call_of(), dtype=np.dtype("float64")),
            "bfloat16 or float16, got dtyp",
        ),
        (call_of(rounding="stochastic"), "rounds to nearest even, got rounding='stochastic'"),
        (call_of(block_size=64), "takes blocks of 16 or 32 along one axis, got blocks=((-1, 64),)"),
        (
            call_of(formats.MXFP4_2D),
            "takes blocks of 16 or 32 along one axis, got blocks=((-2, 32)",
        ),
        (call_of(formats.FLOAT8_ROWWISE_E4M3), "along one axis, got blocks=((-1, WHOLE),)"),
        (call_of(scale_rule="gaussian"), "computes no scales by the rule 'gaussian'"),
        (call_of(NVFP4, scale_rule="four_over_six"), "no scales by the rule 'four_over_six'"),
        (call_of(FNUZ), "needs elements with a negative zero, got element=e4m3fnuz"),
        (call_of(NV_E4M3), "needs elements without NaN under float scales, got element=e4m3"),
        (call_of(shape=(2**16, 2**15)), "needs at most 2147483647 elements, got shape=(65536, 3"),
        (
            both_of(-1, -3, shape=(2, 64, 64)),
            "both ways along the last two axes, got axes (-1, -3)",
        ),
        (both_of(-1, -2, rounding="away"), "rounds to nearest even, got rounding='away'"),
        (
            QuantizeBothCall(first=call_of(MXFP4), second=call_of(NVFP4, axis=-2)),
            "casts both ways in blocks of one size, got 32 and 16",
        ),
    ],
)
def test_rejects_a_call(call: QuantizeCall | QuantizeBothCall, reason: str | None):
    found = quantize.rejects(call, H200, NEW)
    assert found is None if reason is None else (found is not None and reason in found)


def test_nothing_is_asked_of_a_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("asked for devices"))
    for call in (call_of(), both_of(-1, -2)):
        quantize.rejects(call, H200, NEW)
        assert PALLAS_GPU.rejects(call, Target(platform="cpu")) is not None


def tiles_of(block: int, itemsize: int) -> list[tuple[tuple[int, ...], Tile]]:
    """Every kind of tile, on views of whole tiles, wide and narrow."""
    line = 128 // itemsize
    found: list[tuple[tuple[int, ...], Tile]] = [
        (view, views._along_rows(view[0], block, itemsize))
        for view in ((4096, block), (192, block))
    ]
    for down, across in ((2, 4), (4, 1)):
        view = (down, block, across * line)
        found.append((view, views._along_columns(view, block, itemsize)))
        view = (down, block, across * line // block, block)
        found.append((view, views._along_both(view, block, itemsize)))
    return found


def layout_of(tile: Tile) -> Any:
    from mx_jax.backends.pallas_gpu.quantize_kernel import _layout

    return _layout(tile).to_mgpu()


@needs_mosaic
@pytest.mark.parametrize("block", quantize.BLOCKS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_who_holds_what(block: int, itemsize: int):
    for view, tile in tiles_of(block, itemsize):
        assert tile.padded(view) == view, "no padding in these"
        elements = np.arange(np.prod(view)).reshape(view)[tuple(map(slice, tile.shape))]
        held = of_threads(elements, layout_of(tile))
        assert sorted(held.ravel()) == sorted(elements.ravel()), "each by one thread"
        vector = held.shape[-1]
        assert vector * itemsize == 16 and (np.diff(held) == 1).all(), "16 bytes at a time"
        # What a warp loads at a time is whole sectors of memory.
        loads = np.sort(held.reshape(4, 32, -1, vector).swapaxes(1, 2).reshape(-1, 32 * vector))
        sectors = loads.reshape(len(loads), -1, 32 // itemsize)
        assert (np.diff(sectors) == 1).all() and (sectors[..., 0] * itemsize % 32 == 0).all()
        warps = np.empty(tile.shape, int)
        places = np.searchsorted(elements.ravel(), held.reshape(4, -1))
        warps.ravel()[places] = np.arange(4)[:, None]
        for axis in tile.axes:
            assert (warps == warps.take([0], axis)).all(), "a block lies within a warp"


@pytest.mark.parametrize(
    ("shape", "axis", "itemsize", "padding"),
    [
        ((4096, 8192), -1, 2, 1),
        ((1, 2880), -1, 2, 96 / 90),
        ((3, 2880), -2, 2, 48 / 45),
        ((4096, 2880), -2, 2, 1),
        ((4, 32, 192), -2, 4, 1),
    ],
)
def test_what_is_padded(shape: tuple[int, ...], axis: int, itemsize: int, padding: float):
    from mx_jax.backends.pallas_gpu.views import View

    view = View.of(shape, ((axis, 32),))
    padded = view.tile(itemsize).padded(view.shape)
    whole = np.prod(view.shape)
    assert np.prod(padded) / whole == pytest.approx(padding)


@needs_mosaic
def test_a_product_by_the_reciprocal_is_the_quotient():
    """What only a GPU computes, in NumPy, which keeps subnormals: every bfloat16, many scales."""
    from mx_jax.backends.pallas_gpu import quantize_kernel

    x = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    x = x[np.isfinite(x.astype(np.float32))]
    exact = jax.jit(quantize_kernel.over_power_of_two)
    for stored in (*range(0, 255, 11), 1, 2, 253, 254):
        factor = quantize_kernel.reciprocal(jnp.int32(stored))
        with np.errstate(over="ignore"):
            product = x.astype(np.float32) * np.asarray(factor)
        # No scale is so small that its own block overflows.
        in_range = np.isfinite(product)
        product = product[in_range]
        found = np.asarray(exact(jnp.asarray(x), jnp.int32(stored)))[in_range]
        # Far below any element's smallest value, one flushes and the other rounds.
        tiny = np.abs(product) <= np.finfo(np.float32).tiny
        assert (np.signbit(found) == np.signbit(product)).all()
        assert (np.abs(found[tiny]) <= np.finfo(np.float32).tiny).all()
        np.testing.assert_array_equal(found[~tiny], product[~tiny])
