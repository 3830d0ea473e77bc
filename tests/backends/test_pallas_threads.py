"""Registers of GPU threads: Mosaic's layouts, in NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.pallas_gpu.layouts import CHUNK, ROWS, WORDS, slots_of
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat
from tests.backends.mosaic import needs_mosaic

# One of each number of stored bits.
STORED = {4: MXFP4, 8: MXFP8_E4M3}

pytestmark = needs_mosaic


def of_threads(x: np.ndarray, layout: Any) -> np.ndarray:
    """`[thread, register, vector]`: the entries of x that each thread of a warpgroup holds."""
    for tile in layout.tiling.tiles:
        lead, n = x.ndim - len(tile), len(tile)
        sizes = [side for d, t in zip(x.shape[lead:], tile, strict=True) for side in (d // t, t)]
        x = x.reshape(*x.shape[:lead], *sizes)
        axes = [*range(lead), *range(lead, x.ndim, 2), *range(lead + 1, x.ndim, 2)]
        x = x.transpose(axes)
        assert x.ndim == lead + 2 * n
    spread = [d for d in (*layout.warp_dims, *layout.lane_dims) if isinstance(d, int)]
    kept = [d for d in range(-x.ndim, 0) if d not in spread and d != layout.vector_dim]
    x = x.transpose([d % x.ndim for d in (*spread, *kept, layout.vector_dim)])
    return x.reshape(128, -1, x.shape[-1])


@pytest.mark.parametrize("format", STORED.values(), ids=lambda format: format.name)
def test_threads_get_what_the_interpreter_says(
    format: BlockFormat, monkeypatch: pytest.MonkeyPatch
):
    from jax._src.interpreters import mlir
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir

    from mx_jax.backends.pallas_gpu import decode

    layouts = decode.plgpu.Layout
    layout = layouts.WGMMA
    decoder = decode.Decoder(format=format)
    count, slots, width = decoder.group // CHUNK, len(slots_of(format.element)), WORDS
    # Words whose two halves name themselves.
    names = np.arange(slots * ROWS * width, dtype=np.int32).reshape(slots, ROWS, width)
    halves = [jnp.asarray(n << 17 | n << 1 | 1 << 16) for n in names]
    expected = decode._interpreted_halves(halves, count)
    expected = [np.asarray(chunk).view(np.uint16) for chunk in expected]

    class Array:
        def __init__(self, words: np.ndarray):
            self.shape = words.shape
            held = of_threads(words, layouts.WGMMA_8BIT.to_mgpu())
            # A register of a thread as an object: [register] of [thread, vector].
            self.registers = np.empty(held.shape[1], object)
            for i in range(held.shape[1]):
                self.registers[i] = held[:, i]

    monkeypatch.setattr(mgpu.utils, "vector_slice", lambda register, s: register[:, s])
    monkeypatch.setattr(mgpu.utils, "bitcast", lambda register, _: register)
    monkeypatch.setattr(mgpu, "FragmentedArray", lambda _registers, **_: _registers)
    with mlir.make_ir_context(), ir.Location.unknown():
        operands = decode._mosaic_halves([Array(n) for n in names], count)
    for registers, chunk in zip(operands, expected, strict=True):
        held = of_threads(chunk, layout.to_mgpu())
        assert registers.size == held.shape[1]
        for i, register in enumerate(registers.reshape(-1)):
            pair = np.concatenate([register << 1, register << 1 | 1], axis=1) & 0xFFFF
            np.testing.assert_array_equal(held[:, i], pair)
