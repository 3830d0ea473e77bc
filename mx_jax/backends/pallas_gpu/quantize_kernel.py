"""The quantizing kernel: one read of a tensor, codes and scales along one axis or two.

A program of one warpgroup loads a tile from global memory into registers, 16 bytes a thread at a
time, and stores what it becomes: nothing is staged in shared memory, and several programs on a
processor hide each other's waits. A warp holds whole blocks, so a block's largest magnitude takes a
few shuffles.

Magnitudes are compared as patterns, whose order is that of the values; a power-of-two scale comes
from the pattern's exponent, by additions and shifts. Elements are multiplied by a power of two,
which is exact, and rounded once: by the conversion instruction where the GPU has one, else by
adding a number so large that float32's own rounding drops the right bits. All of it is plain array
code, which the interpreter runs too.

Device code; imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array

from mx_jax.backends.pallas_gpu.device import plgpu
from mx_jax.codecs import float32
from mx_jax.codecs.scale import E8M0_NAN, opaque_divide
from mx_jax.formats import E4M3, E5M2, BlockFormat, ElementFormat
from mx_jax.formats.element import known_element

# E8M0's largest scale, 2^127.
_LARGEST_STORED = 254
_MANTISSA_BITS = 23
# What `cvt.rn.satfinite` writes, from compute capability 8.9 on.
_CONVERTED = (E4M3, E5M2)

Shape = tuple[int, ...]

LANES = 32
WARPS = 4
# What a thread loads at a time, and what a warp reads of a row, where rows are longer.
_VECTOR_BYTES = 16
_LINE_BYTES = 128
# Values that a thread holds of a tile of rows.
_PER_THREAD = 32


def quantize(
    x: jax.Array,
    tensor_scale: jax.Array | None,
    *,
    tile: "Tile",
    encoders: Sequence["Encoder"],
    interpret: object = None,
) -> list[jax.Array]:
    """For each of the tile's axes, uint8 codes like x and uint8 scales, which lack the axis.

    Args:
      x: float32, bfloat16 or float16, seen as `tile` says, in whole tiles.
      tensor_scale: float32 `[1]`, or None.
      tile: what one program quantizes.
      encoders: one for each axis.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    layout, shape, count = _layout(tile), tile.shape, 2 * len(encoders)
    tiles = [n // length for n, length in zip(x.shape, shape, strict=True)]

    def body(x_gmem, *rest):
        given, outs = rest[:-count], rest[-count:]
        # Where this program's tile begins; the last axis runs fastest.
        index, at = lax.axis_index("tile"), ()
        for number, length in zip(tiles[::-1], shape[::-1], strict=True):
            at = pl.ds(lax.rem(index, jnp.int32(number)) * length, length), *at
            index = lax.div(index, jnp.int32(number))
        x = plgpu.load(x_gmem.at[at], layout=layout, optimized=False)
        for axis, encoder, codes_gmem, scales_gmem in zip(
            tile.axes, encoders, outs[::2], outs[1::2], strict=True
        ):
            kept = tuple(a for a in range(len(shape)) if a != axis)

            def spread(blocks: Any, kept: Any = kept) -> Any:
                """One number a block to one an element."""
                return plgpu.layout_cast(lax.broadcast_in_dim(blocks, shape, kept), layout)

            of_tensor = given[0][0] if given else None
            # float32 patterns of magnitudes.
            if x.dtype == jnp.bfloat16:
                bits = lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) << 16
            else:
                bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
            amax = jnp.max(bits & jnp.int32(float32.ABS), axis=axis)
            divide = opaque_divide if encoder.interpreted else _division(layout, shape, axis)
            stored, factor = encoder.scales(amax, of_tensor, divide)
            codes = encoder.codes(x, stored, factor, spread)
            plgpu.store(codes_gmem.at[at], codes, optimized=False)
            of_blocks = at[:axis] + at[axis + 1 :]
            plgpu.store(scales_gmem.at[of_blocks], stored.astype(jnp.uint8), optimized=False)

    of_scales = (x.shape[:axis] + x.shape[axis + 1 :] for axis in tile.axes)
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(own, jnp.uint8)
            for scales in of_scales
            for own in (x.shape, scales)
        ],
        grid=(math.prod(tiles),),
        grid_names=("tile",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # No thread reads what another writes.
            unsafe_no_auto_barriers=True,
        ),
        kernel_name=f"mx_jax_quantize_{encoders[0].format.name}",
        interpret=interpret,
    )(x, *(() if tensor_scale is None else (tensor_scale,)))


def _division(layout: Any, shape: tuple[int, ...], axis: int) -> Any:
    """The quotient of blocks' numbers, rounded once: Mosaic's own may be off by two units."""
    layout, shape = layout.reduce(axis), shape[:axis] + shape[axis + 1 :]
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    def divide(_, numerator, denominator):
        exact = numerator._lift_fast_instr("div.rn.f32")
        return numerator._pointwise(exact, denominator)

    def divided(numerator: Any, denominator: Any) -> Any:
        wide = jnp.broadcast_to(denominator, shape)
        return divide(*(plgpu.layout_cast(array, layout) for array in (numerator, wide)))

    return divided


def _layout(tile: "Tile") -> Any:
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


# How the kernel sees a tensor, and what one program takes of it at a time ------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program quantizes of a view, and how its warps, their lanes and registers share it.

    Each size below divides the one before, axis by axis; the view has as many axes.

    Attributes:
      axes: along each of these a tile has one whole block.
      shape: the tile.
      all_warps: what four warps hold in their first registers.
      warp: what a warp holds of that.
      lanes: what its lanes hold in one vector each.
      vector: what one lane loads at a time.
    """

    axes: tuple[int, ...]
    shape: Shape
    all_warps: Shape
    warp: Shape
    lanes: Shape
    vector: Shape

    def padded(self, shape: Shape) -> Shape:
        """The smallest view of whole tiles."""
        return tuple(n + -n % tile for n, tile in zip(shape, self.shape, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How the kernel sees a tensor: `[outer * length / block, block, ...]`.

    Attributes:
      original: the tensor's shape.
      split: the same as `[outer, length]`, `[outer, length, inner]` for blocks along another axis
        than the last, or `[outer, length, last]` for blocks along both.
      block: elements of a block.
      both: whether there are blocks along the last axis too.
    """

    original: tuple[int, ...]
    split: tuple[int, ...]
    block: int
    both: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], blocks: Sequence[tuple[int, Any]]) -> "View":
        """The view for blocks along these axes, ascending."""
        axis, block = blocks[0]
        axis %= len(shape)
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        both = len(blocks) > 1
        split = (outer, shape[axis], inner) if both or inner > 1 else (outer, shape[axis])
        return cls(original=shape, split=split, block=block, both=both)

    @property
    def whole(self) -> tuple[int, ...]:
        """`split` in whole blocks."""
        blocked = (1, 2) if self.both else (1,)
        return tuple(n + -n % self.block if i in blocked else n for i, n in enumerate(self.split))

    @property
    def shape(self) -> tuple[int, ...]:
        """What the kernel sees, before it is padded to whole tiles."""
        outer, length, *inner = self.whole
        if self.both:
            inner = [inner[0] // self.block, self.block]
        return (outer * (length // self.block), self.block, *inner)

    def tile(self, itemsize: int) -> Tile:
        """What one program quantizes of it."""
        shape, block = self.shape, self.block
        line, vector = _LINE_BYTES // itemsize, _VECTOR_BYTES // itemsize
        if len(shape) == 2:
            # Whole blocks one after another in memory.
            rows, repeats = LANES * vector // block, _PER_THREAD // vector
            while shape[0] % (WARPS * rows * repeats) and repeats > 1:
                repeats //= 2
            return Tile(
                axes=(1,),
                shape=(WARPS * rows * repeats, block),
                all_warps=(WARPS * rows, block),
                warp=(rows, block),
                lanes=(rows, block),
                vector=(1, vector),
            )
        # Lines of 128 bytes under each other; with blocks along rows too, those are the last axis.
        inside = shape[3:]
        wide = line // math.prod(inside)

        def area(warps: tuple[int, int]) -> int:
            sizes = zip((shape[0], shape[2]), (warps[0], warps[1] * wide), strict=True)
            return math.prod(n + -n % size for n, size in sizes)

        # So many warps down and across: the way that pads least, the widest of those.
        down, across = min(((1, WARPS), (2, WARPS // 2), (WARPS, 1)), key=area)
        all_warps = (down, block, across * wide, *inside)
        return Tile(
            axes=(1, 3) if inside else (1,),
            shape=all_warps,
            all_warps=all_warps,
            warp=(1, block, wide, *inside),
            lanes=(1, LANES * vector // line, wide, *inside),
            vector=(*(1,) * (len(shape) - 1), vector),
        )

    def into(self, x: jax.Array) -> jax.Array:
        """The tensor as the view; a copy only where its last blocks are partial."""
        return padded(x.reshape(self.split), self.whole).reshape(self.shape)

    def codes(self, codes: jax.Array) -> jax.Array:
        """The kernel's codes in the tensor's shape."""
        return self._cut(codes, self.shape, self.whole, self.split).reshape(self.original)

    def scales(self, scales: jax.Array, index: int, shape: tuple[int, ...]) -> jax.Array:
        """The kernel's scales along the first or second of the blocked axes, in their own shape."""
        axis = 1 + index
        inside = 2 * axis - 1
        kept = self.shape[:inside] + self.shape[inside + 1 :]
        whole, split = list(self.whole), list(self.split)
        whole[axis] = split[axis] = whole[axis] // self.block
        return self._cut(scales, kept, whole, split).reshape(shape)

    @staticmethod
    def _cut(x: jax.Array, kept: Sequence[int], whole: Sequence[int], split: Any) -> jax.Array:
        """Without what whole tiles added, then without what whole blocks did."""
        return x[tuple(map(slice, kept))].reshape(whole)[tuple(map(slice, split))]


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros behind, up to a shape."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, wide - n) for n, wide in zip(x.shape, shape, strict=True)])


# Values to codes and scales -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """From a tile of values to its codes and scales.

    Attributes:
      format: the block format.
      threshold: of rules for power-of-two scales: see `ScaleRule`; None for scales in an element
        format.
      smallest_scale: the smallest scale in an element format that the rule gives.
      converts: whether the GPU converts to float8.
      interpreted: whether stand-ins replace what XLA on CPU would get wrong.
    """

    format: BlockFormat
    threshold: int | None
    smallest_scale: float = 0.0
    converts: bool = True
    interpreted: bool = False

    def scales(
        self, amax: Any, tensor_scale: Any, divide: Callable[[Any, Any], Any]
    ) -> tuple[Any, Any]:
        """Stored scales as int32, and what `codes` multiplies by, of patterns of the largest.

        `divide` is given two arrays, or an array and a scalar, and rounds once.
        """
        if self.threshold is not None:
            stored = power_of_two_scale(amax, self.format.element, self.threshold)
            return stored, stored if self.interpreted else reciprocal(stored)
        # NVFP4's own arithmetic: each step rounds in float32.
        of = self.format.scale.element
        assert of is not None
        finite = amax < float32.INF
        largest = lax.bitcast_convert_type(jnp.where(finite, amax, 0), jnp.float32)
        scale = divide(largest, jnp.float32(self.format.element.max))
        if tensor_scale is not None:
            scale = divide(scale, tensor_scale)
        known = finite & (scale == scale)
        scale = jnp.minimum(jnp.maximum(scale, self.smallest_scale), of.max)
        stored = jnp.where(known, halves(scale, of), self._nan_scale)
        factor = jnp.ones_like(largest)
        if tensor_scale is not None:
            factor = divide(factor, tensor_scale)
        return stored, divide(factor, _decoded(stored, of))

    def codes(self, x: Any, stored: Any, factor: jax.Array, spread: Callable[[Any], Any]) -> Any:
        """uint8 codes of x; blocks with a NaN or Inf get the format's NaN, or 0.

        Args:
          x: the values.
          stored: stored scales of blocks, int32.
          factor: what `scales` gave with them.
          spread: from one number a block to one an element.
        """
        element, factor = self.format.element, spread(factor)
        if self.threshold is not None and self.interpreted:
            # XLA on CPU flushes subnormals: exponents there are added, not multiplied.
            values = over_power_of_two(x, factor)
        else:
            values = x.astype(jnp.float32) * factor
        if self.threshold is None:
            # Where a tensor scale is so small that its reciprocal is infinite, zeros become NaN.
            values = jnp.where(values == values, values, jnp.float32(0))
        nan = stored == self._nan_scale
        codes = self._rounded(values) & spread(jnp.where(nan, 0, 0xFF).astype(jnp.uint8))
        if not element.nan_code:
            return codes
        return codes | spread(jnp.where(nan, element.nan_code, 0).astype(jnp.uint8))

    @property
    def _nan_scale(self) -> int:
        of = self.format.scale.element
        code = E8M0_NAN if of is None else of.nan_code
        assert code is not None
        return code

    def _rounded(self, values: jax.Array) -> Any:
        """uint8 codes, of blocks that hold no NaN."""
        element = self.format.element
        if element.kind == "int":
            # Two's complement: the low bits of a sum whose last place is the element's quantum.
            quantum = element.smallest_subnormal
            lowest = -(element.max + quantum * element.negative_extra)
            values = jnp.maximum(values, jnp.float32(lowest))
            sums = jnp.minimum(values, jnp.float32(element.max))
            sums += jnp.float32(1.5 * 2.0**_MANTISSA_BITS * quantum)
            return lax.bitcast_convert_type(sums, jnp.int32).astype(jnp.uint8)
        if self.converts and known_element(element) in _CONVERTED:
            if self.interpreted:
                # XLA's conversion does not saturate.
                values = jnp.clip(values, -element.max, element.max)
            return lax.bitcast_convert_type(values.astype(element.dtype), jnp.uint8)
        signs = lax.bitcast_convert_type(values, jnp.int32)
        signs = lax.shift_right_logical(signs, jnp.full_like(signs, 32 - element.bits))
        return (halves(values, element) | signs & element.sign_code).astype(jnp.uint8)


def power_of_two_scale(pattern: jax.Array, element: ElementFormat, threshold: int) -> Any:
    """E8M0 bytes, as int32, of float32 patterns of largest magnitudes.

    `E - emax`, plus one where the mantissa reaches the threshold: adding what is missing to the
    next power of two carries into the exponent. Only one octave of subnormals can matter, to
    elements whose largest exponent is 0; doubling makes it normal.
    """
    missing = (1 << _MANTISSA_BITS) - threshold
    subnormal = pattern < float32.HIDDEN
    normal = jnp.where(subnormal, pattern + pattern, pattern) + missing
    exponent = (normal >> _MANTISSA_BITS) - jnp.where(subnormal, 1, 0) - element.emax
    stored = jnp.minimum(jnp.maximum(exponent, 0), _LARGEST_STORED)
    return jnp.where(pattern >= float32.INF, E8M0_NAN, stored)


def reciprocal(stored: Any) -> Any:
    """One over an E8M0 scale, in float32: 2^-127 is a subnormal, but a number."""
    exponent = jnp.maximum(_LARGEST_STORED - stored, 0) << _MANTISSA_BITS
    return lax.bitcast_convert_type(jnp.maximum(exponent, 1 << _MANTISSA_BITS - 1), jnp.float32)


def over_power_of_two(x: Any, stored: Any) -> Any:
    """x over E8M0 scales in float32, without a multiplication; below 2^-126 it is a zero."""
    bits = float32.to_bits(x)
    magnitude = bits & float32.ABS
    biased, mantissa = float32.normalize(magnitude)
    exponent = biased + 127 - stored
    pattern = jnp.where(exponent > 0, exponent << _MANTISSA_BITS | mantissa, 0)
    pattern = jnp.where(magnitude == 0, 0, pattern)
    return lax.bitcast_convert_type(pattern | bits & jnp.int32(float32.SIGN), jnp.float32)


def halves(values: jax.Array, element: ElementFormat) -> Any:
    """Codes of |values| as int32, rounded to nearest even and saturated; NaN becomes some code.

    With E the exponent, or emin if that is larger, |value| + 2^(E + 23 - mantissa_bits) is rounded
    where the element ends. What the sum's pattern has grown by is the significand; the code is that
    plus the exponent's offset.
    """
    dropped = _MANTISSA_BITS - element.mantissa_bits
    magnitude = jnp.minimum(jnp.abs(values), jnp.float32(element.max))
    smallest = (127 + element.emin) << _MANTISSA_BITS
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    top = jnp.maximum(bits & jnp.int32(float32.INF), smallest)
    large = top + (dropped << _MANTISSA_BITS)
    sums = magnitude + lax.bitcast_convert_type(large, jnp.float32)
    significand = lax.bitcast_convert_type(sums, jnp.int32) - large
    return significand + ((top - smallest) >> dropped)


def _decoded(codes: jax.Array, element: ElementFormat) -> Any:
    """Values of non-negative codes; the NaN code becomes NaN."""
    smallest = element.smallest_subnormal
    rebias = (127 - element.bias) << element.mantissa_bits
    normal = (codes + rebias) << (_MANTISSA_BITS - element.mantissa_bits)
    subnormal = lax.bitcast_convert_type(codes.astype(jnp.float32) * smallest, jnp.int32)
    pattern = jnp.where(codes < (1 << element.mantissa_bits), subnormal, normal)
    pattern = jnp.where(codes == element.nan_code, float32.NAN, pattern)
    return lax.bitcast_convert_type(pattern, jnp.float32)
