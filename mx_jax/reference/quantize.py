"""The meaning of quantize and dequantize, in plain jnp: every backend must match these bits."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.axes import Axes
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import has_explicit_axes, split_axes
from mx_jax.codecs.float32 import select
from mx_jax.codecs.lowering import by_halves, platform_dependent
from mx_jax.codecs.rounding import NEAREST, Rounding
from mx_jax.codecs.scale import encode_scaled, lift, lower, true_divide
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.scale_rules import BlockData, PowerOfTwo, ScaleRule

# A thread of a GPU has registers for so many elements of a block; longer ones have such parts.
_SHORT, _PART = 64, 32


def quantize(
    x: jax.Array,
    format: BlockFormat,
    blocks: Blocks,
    scale_rule: ScaleRule,
    rounding: Rounding = NEAREST,
    random_bits: jax.Array | None = None,
    tensor_scale: jax.Array | None = None,
) -> MXArray:
    """Quantize x: per block amax, scale, then every element over its scale, rounded once.

    `codes = encode(x / scale)`, `scale = rule(max |x| over the block)`, MX v1.0 section 6.3.

    Args:
      x: float32, bfloat16 or float16.
      format: the block format.
      blocks: axes from the end with block sizes.
      scale_rule: from amax to the stored scale.
      rounding: how dropped bits decide.
      random_bits: for stochastic rounding, of x's shape; of the scales' shape where the rule
        rounds them stochastically.
      tensor_scale: float32 of shape [1, ..., 1] to use instead of the computed one.

    Returns:
      An `MXArray` without a link to x.
    """
    x = lax.stop_gradient(x)
    # Rules of values may count them, zeros that fill up the block included.
    fill = scale_rule.reads_values
    pieces, inside = block_shapes.split(x, blocks, fill=fill)
    amax = block_amax(pieces, inside)
    if format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(amax, scale_rule.largest_value(format), x.ndim)
    spread_scale = None if tensor_scale is None else block_shapes.spread(tensor_scale, inside)
    data = BlockData(pieces, inside, amax, format, spread_scale)
    scales, bits = scale_rule.scales(data), None
    if random_bits is not None and not scale_rule.rounding.random_bits:
        bits, _ = block_shapes.split(random_bits, blocks, fill=fill)
    codes = encode_scaled(
        pieces,
        scales,
        format,
        tensor_scale=spread_scale,
        rounding=rounding,
        random_bits=bits,
        # Powers of two are NaN for a block that holds one, or Inf.
        has_nan=not isinstance(scale_rule.scales, PowerOfTwo) or scale_rule.correction is not None,
        fits=scale_rule.brings_to_max,
    )
    if scale_rule.correction is not None:
        drawn = None if random_bits is None else block_shapes.spread(random_bits, inside)
        scales = scale_rule.correction(data, scales, codes, drawn)
    return MXArray(
        codes=block_shapes.merge(codes, x.shape, inside),
        scales=lax.squeeze(scales, inside),
        tensor_scale=tensor_scale,
        format=format,
        blocks=blocks,
        dtype=x.dtype,
    )


def block_amax(pieces: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """Float32 patterns of each block's largest magnitude, int32; axes inside blocks kept.

    Patterns of non-negative floats order as integers: the maximum is exact, subnormal or not. Those
    of bfloat16 do so before they are widened, and take half the memory between XLA's kernels.
    """

    on_gpu = None
    if len(inside) == 1 and not has_explicit_axes():
        axis = inside[0]
        blocks, length = pieces.shape[axis - 1], pieces.shape[axis]
        # Nothing is known of a symbolic length. Symbolic blocks are many.
        many = not (isinstance(blocks, int) and blocks == 1)
        # A kernel of XLA's holds reductions along one axis alone. Without any, scales along both
        # axes of an array cost one reading of it, and so do the casts that follow. A thread reads a
        # block by itself: 32 numbers side by side in four instructions.
        if many and isinstance(length, int) and length <= _SHORT:
            on_gpu = functools.partial(by_halves, float32.max, axis=axis)
        elif not many and isinstance(length, int) and length > _SHORT and length % _PART == 0:
            on_gpu = functools.partial(_largest_of_parts, axis=axis)

    def reduced(magnitudes: jax.Array) -> jax.Array:
        return lax.expand_dims(lax.reduce_max(magnitudes, inside), inside)

    def on_tpus(pieces: jax.Array) -> jax.Array:
        last = pieces.ndim - 1
        if last not in inside or not block_shapes.underfills_lanes(pieces[..., :1], pieces):
            return _largest_by_registers(pieces, inside)
        # Transposed while it is narrow.
        rows = block_shapes.merge_minor(pieces)
        columns = lax.optimization_barrier(jnp.swapaxes(rows, -1, -2))
        shape = (*columns.shape[:-2], *pieces.shape[-2:], columns.shape[-1])
        columns = split_axes(columns, shape, (len(shape) - 2,))
        largest = _largest_by_registers(columns, (len(shape) - 2,))
        largest = jnp.moveaxis(largest, -1, -3)
        others = tuple(axis for axis in inside if axis != last)
        return lax.expand_dims(lax.reduce_max(largest, others), others) if others else largest

    def elsewhere(pieces: jax.Array) -> jax.Array:
        narrow = pieces.dtype == jnp.bfloat16
        bits = (
            lax.bitcast_convert_type(pieces, jnp.int16) if narrow else float32.float32_bits(pieces)
        )
        magnitudes = float32.bitwise_and(bits, bits.dtype.type(jnp.iinfo(bits.dtype).max))
        if on_gpu is None:
            amax = reduced(magnitudes)
        else:
            amax = platform_dependent(magnitudes, cuda=on_gpu, rocm=on_gpu, default=reduced)
        # Widened as bfloat16 is.
        return float32.shift_left(lax.convert_element_type(amax, jnp.int32), 16) if narrow else amax

    return platform_dependent(pieces, tpu=on_tpus, default=elsewhere)


def _largest_by_registers(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    # Of 32 bits each; unsigned integers are compared in one instruction.
    magnitudes = float32.bitwise_and(float32.widened_bits(x), float32.ABS)
    largest = lax.reduce_max(lax.bitcast_convert_type(magnitudes, jnp.uint32), axes)
    return lax.expand_dims(lax.bitcast_convert_type(largest, jnp.int32), axes)


def _largest_of_parts(magnitudes: jax.Array, axis: int) -> jax.Array:
    """The largest along a whole axis, by halves of its parts: so those along both axes of a matrix
    cost one reading of it too."""
    shape = magnitudes.shape
    parts = magnitudes.reshape(*shape[:axis], -1, _PART, *shape[axis + 1 :])
    largest = lax.squeeze(by_halves(float32.max, parts, axis + 1), (axis + 1,))
    return lax.expand_dims(lax.reduce_max(largest, (axis,)), (axis,))


def find_tensor_scale(
    x: jax.Array, blocks: Blocks, largest_value: float, axis_names: Sequence[str] = ()
) -> jax.Array:
    """`tensor_scale_of` of values in blocks."""
    pieces, inside = block_shapes.split(lax.stop_gradient(x), blocks)
    return tensor_scale_of(block_amax(pieces, inside), largest_value, x.ndim, tuple(axis_names))


def find_row_scales(x: jax.Array, axes: Axes, blocks: Blocks, largest_value: float) -> jax.Array:
    """`tensor_scale_of` each vector along the contracting axes, of length 1 there."""
    # From the end: experts lie in front of the axes of a product of rows in groups.
    contracting = tuple(axis - axes.ndim for axis in axes.contracting)
    pieces, inside = block_shapes.split(lax.stop_gradient(x), blocks)
    amax = lax.squeeze(block_amax(pieces, inside), inside)
    largest = jnp.max(_finite(amax), contracting, initial=0, keepdims=True)
    return _tensor_scale(largest, largest_value)


def tensor_scale_of(
    amax: jax.Array, largest_value: float, ndim: int, axis_names: tuple[str, ...] = ()
) -> jax.Array:
    """`amax / (largest block scale * largest element)`, float32 of shape [1] * ndim.

    Of all devices along the named axes of `jax.shard_map`. Blocks with NaN or Inf are left out,
    since they become NaN by themselves; a tensor of zeros has scale 1, and no other a smaller one
    than the smallest float32.
    """
    largest = jnp.max(_finite(amax), initial=0)
    largest = lax.pmax(largest, axis_names) if axis_names else largest
    return _tensor_scale(largest.reshape((1,) * ndim), largest_value)


def _finite(amax: jax.Array) -> jax.Array:
    return select(float32.lt(amax, float32.INF), amax, 0)


def _tensor_scale(largest: jax.Array, largest_value: float) -> jax.Array:
    # Above 2^-64 even the smallest scale is far from subnormals.
    small = float32.lt(largest, (127 - 64) << 23)
    scale = true_divide(lift(float32.from_bits(largest), small), largest_value)
    bits = float32.max(lower(float32.float32_bits(scale), small), 1)
    return select(float32.eq(largest, 0), 1.0, float32.from_bits(bits))
