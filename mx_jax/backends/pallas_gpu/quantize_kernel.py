"""The quantizing kernel: one read of a tensor, codes and scales along one axis or two.

Device code only; `quantize.py` checks, pads and picks. A program of one warpgroup loads a tile from
global memory into registers, 16 bytes a thread at a time, and stores what it becomes: nothing is
staged in shared memory, and several programs on a processor hide each other's waits. A warp holds
whole blocks, so a block's largest magnitude takes a few shuffles.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array

from mx_jax.backends.pallas_gpu.device import plgpu, store
from mx_jax.backends.pallas_gpu.encode import Encoder, Pairs
from mx_jax.backends.pallas_gpu.views import Tile
from mx_jax.codecs.scale import opaque_divide


def quantize(
    x: jax.Array,
    tensor_scales: jax.Array | None,
    *,
    tile: Tile,
    encoders: tuple[Encoder, ...],
    interpret: Any = None,
) -> list[jax.Array]:
    """Codes and scales along each of the tile's axes, in turn.

    Args:
      x: float32, bfloat16 or float16, seen as `tile` says, in whole tiles.
      tensor_scales: float32, one for each axis, or None.
      tile: what one program quantizes.
      encoders: one for each axis.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      For each axis, uint8 codes in the shape of x and uint8 scales, which lack the axis.
    """
    shapes = []
    for axis in tile.axes:
        shapes += [x.shape, x.shape[:axis] + x.shape[axis + 1 :]]
    program = QuantizeProgram(tile=tile, encoders=encoders, counts=tile.counts(x.shape))
    operands = (x,) if tensor_scales is None else (x, tensor_scales)
    return plgpu.kernel(
        program.body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
        grid=(math.prod(program.counts),),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No thread reads what another writes.
            unsafe_no_auto_barriers=True,
        ),
        kernel_name=f"mx_jax_quantize_{encoders[0].format.name}",
        interpret=interpret,
    )(*operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeProgram:
    """What each program runs.

    Attributes:
      tile: what it quantizes.
      encoders: one for each axis.
      counts: tiles along each axis.
    """

    tile: Tile
    encoders: tuple[Encoder, ...]
    counts: tuple[int, ...]

    def body(self, x_gmem, *rest):
        """One tile: load, then quantize along each axis and store."""
        count = 2 * len(self.encoders)
        given, outs = rest[:-count], rest[-count:]
        at = self._at()
        pairs = Pairs(
            shape=self.tile.shape,
            numbers=_layout(self.tile),
            words=_layout(self.tile.in_words()),
            interpreted=self.encoders[0].interpreted,
        )
        x = plgpu.load(x_gmem.at[at], layout=pairs.numbers, optimized=False)
        for i, (axis, encoder) in enumerate(zip(self.tile.axes, self.encoders, strict=True)):
            codes_gmem, scales_gmem = outs[2 * i : 2 * i + 2]
            tensor_scale = given[0][i] if encoder.format.tensor_scale else None
            amax = jnp.max(encoder.magnitudes(x), axis=axis)
            divide = opaque_divide if encoder.interpreted else _division(pairs, axis)
            stored, factor = encoder.scales(amax, x.dtype, tensor_scale, divide)
            spread = functools.partial(_spread, axis=axis, pairs=pairs)
            codes = encoder.codes(x, stored, factor, spread, pairs)
            store(codes_gmem.at[at], codes)
            store(scales_gmem.at[at[:axis] + at[axis + 1 :]], stored.astype(jnp.uint8))

    def _at(self) -> tuple[Any, ...]:
        """Where this program's tile lies; the last axis runs fastest."""
        index, at = lax.axis_index("tile"), []
        for count, length in zip(self.counts[::-1], self.tile.shape[::-1], strict=True):
            at.append(pl.ds(lax.rem(index, jnp.int32(count)) * length, length))
            index = lax.div(index, jnp.int32(count))
        return tuple(at[::-1])


def _division(pairs: Pairs, axis: int) -> Any:
    """The quotient of blocks' numbers, rounded once: Mosaic's own may be off by two units."""
    layout = pairs.numbers.reduce(axis)
    shape = pairs.shape[:axis] + pairs.shape[axis + 1 :]
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    def divide(_, numerator, denominator):
        exact = numerator._lift_fast_instr("div.rn.f32")
        return numerator._pointwise(exact, denominator)

    def divided(numerator: Any, denominator: Any) -> Any:
        wide = jnp.broadcast_to(denominator, shape)
        return divide(*(plgpu.layout_cast(array, layout) for array in (numerator, wide)))

    return divided


def _spread(blocks: Any, *, axis: int, pairs: Pairs) -> Any:
    """One number a block to one an element."""
    kept = tuple(a for a in range(len(pairs.shape)) if a != axis)
    wide = lax.broadcast_in_dim(blocks, pairs.shape, kept)
    return plgpu.layout_cast(wide, pairs.numbers)


def _layout(tile: Tile) -> Any:
    """Who holds what, in Mosaic's terms: each tiling appends its axes, the last are a vector's."""
    tiling = fragmented_array.Tiling((tile.all_warps, tile.warp, tile.lanes, tile.vector))
    rank = len(tile.shape)
    layout = fragmented_array.TiledLayout(
        tiling,
        warp_dims=tuple(range(-4 * rank, -3 * rank)),
        lane_dims=tuple(range(-2 * rank, -rank)),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
