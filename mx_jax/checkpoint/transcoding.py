"""Codes under scales of another kind, where not one value changes, and the proof of it."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.layouts import LAYOUTS, Layout
from mx_jax.checkpoint.scales import decoded, effective_scales, element_values, encoded_scales
from mx_jax.codecs.blocks import Blocks, block_extent, check_parts
from mx_jax.formats import BlockFormat, ScaleFormat, block_format
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# E4M3's powers of two reach from 2^-9 to 2^8. A tensor scale below 2^-126 would be flushed to zero.
_LARGEST_POWER, _SMALLEST_NORMAL = 8, -126


def transcode(
    x: Quantized, target: BlockFormat | str, *, tensor_scale: float | None = None
) -> MXArray:
    """Store a quantized tensor under scales of another kind, without changing a value.

    Codes stay; block scales are split, joined and encoded anew. MXFP4 becomes NVFP4 where its
    exponents lie within 18 octaves: scale_2 = 2^(kmax - 8), of the largest exponent. E8M0 becomes
    E4M3 or float32, and the way back. Blocks of zeros alone take any scale.

    Args:
      x: quantized along the axes that the target wants blocks along.
      target: a format, its name, or the name of a layout that is to hold it.
      tensor_scale: of the target, where it has to be that of other tensors too; default: the one
        above.

    Returns:
      The tensor: every value is that of x, decoded and compared.

    Raises:
      ValueError: elements or axes of another kind, a tensor scale for a target that has none, or
        blocks that do not fit, with their number.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> x = mx_jax.quantize(jnp.linspace(-4, 4, 64).reshape(1, 64), "mxfp4")
      >>> y = checkpoint.transcode(x, "nvfp4")
      >>> y.scales.shape, float(y.tensor_scale[0, 0])
      ((1, 4), 0.00390625)
      >>> bool((x.dequantize() == y.dequantize()).all())
      True
    """
    source = unpacked(x)
    made, misfits = under_scales_of(source, target, tensor_scale)
    if misfits.any():
        raise ValueError(
            f"transcode: {int(misfits.sum())} of {misfits.size} blocks of {made.format.name} "
            f"cannot hold what {source.format.name} of shape={source.shape} holds; quantize the "
            "high-precision tensor anew"
        )
    check_parts(made, "transcode")
    # The proof: both decoded and compared, to the sign of zero. An error is one of this module.
    for one, other in zip(decoded(source), decoded(made), strict=True):
        if (one.view(np.int64) != other.view(np.int64)).any():
            raise AssertionError(f"transcode: {made.format.name} changed a value; please report it")
    return made


def under_scales_of(
    source: MXArray, target: BlockFormat | str, tensor_scale: float | None = None
) -> tuple[MXArray, np.ndarray]:
    """What `transcode` makes, and which of its blocks are not what they should be."""
    check_parts(source, "transcode")
    row = next((row for row in LAYOUTS if row.name == target), None)
    format = row.format if row is not None else block_format(target)
    blocks = _blocks(source, format, row)
    wanted, unfit = _wanted(source, blocks, format.scale)
    whole = _tensor_scale(source, format, wanted)
    if tensor_scale is not None:
        if not format.tensor_scale or not 2.0**_SMALLEST_NORMAL <= tensor_scale < math.inf:
            raise ValueError(
                f"transcode: got tensor_scale={tensor_scale} for format={format.name}; it is a "
                "positive number, for formats that have one: leave it out"
            )
        whole = np.full_like(whole, tensor_scale)
    scales, same = encoded_scales(wanted / whole, format.scale)
    # Zero is wanted of blocks of zeros, for which any scale will do.
    unfit = unfit | ~same & (wanted != 0)
    if format.scale.is_float32:
        # Machines that flush subnormal numbers would lose such a scale.
        unfit = unfit | (scales > 0) & (scales < np.finfo(np.float32).tiny)
    if row is not None and row.divides and (np.frexp(whole)[0] != 0.5).any():
        # What divides is the factor's reciprocal, which float32 has of powers of two alone.
        unfit = np.ones_like(unfit)
    made = MXArray(
        codes=source.codes,
        scales=jnp.asarray(scales),
        tensor_scale=jnp.asarray(whole, jnp.float32) if format.tensor_scale else None,
        format=format,
        blocks=blocks,
        dtype=source.dtype,
    )
    return made, unfit


def _blocks(x: MXArray, format: BlockFormat, row: Layout | None) -> Blocks:
    """Blocks of the target, along the axes that the source has them."""
    one, other = x.format, format
    alike = dataclasses.replace(one.element, name=other.element.name) == other.element
    axes = sorted(axis for axis, _ in x.blocks)
    sizes = [size for size in format.block if size != 1]
    blocks = tuple(zip(axes, sizes, strict=False))
    fits = len(axes) == len(sizes) and (row is None or blocks in row.orientations)
    divisor = "divisor" in (one.scale.kind, other.scale.kind)
    if not alike or not fits or divisor:
        raise ValueError(
            f"transcode: {format.name} takes {other.element.name} codes in blocks of "
            f"{format.block} under scales that multiply, got format={one.name}, "
            f"blocks={x.blocks}, element={one.element.name}, scale={one.scale.name}; quantize anew"
        )
    return blocks


def _wanted(x: MXArray, blocks: Blocks, scale: ScaleFormat) -> tuple[np.ndarray, np.ndarray]:
    """The scale that each block of the target has to have, 0 of zeros; which cannot have one."""
    scales, used = effective_scales(x), (element_values(x) != 0)[np.asarray(x.codes)]
    bad = np.isnan(scales)
    targets, shared = dict(blocks), dict[int, int]()
    for axis, size in x.blocks:
        length = x.shape[axis]
        extent = block_extent(size, length)
        common = math.gcd(extent, block_extent(targets[axis], length))
        places = np.arange(0, length, common)
        used = np.logical_or.reduceat(used, places, axis) if length else used
        scales, bad = (np.take(part, places // extent, axis) for part in (scales, bad))
        shared[axis] = common
    high, low = np.where(used, scales, 0), np.where(used, scales, np.inf)
    for axis, size in blocks:
        per_block = block_extent(size, x.shape[axis]) // shared[axis]
        starts = np.arange(0, high.shape[axis], per_block)
        if starts.size:
            high = np.maximum.reduceat(high, starts, axis)
            low = np.minimum.reduceat(low, starts, axis)
            bad = np.logical_or.reduceat(bad, starts, axis)
    # Codes that are not zero may be under a scale that is, which exponents cannot be.
    lost = (low == 0) & (scale.kind == "exponent")
    return high, bad | lost | ((high != low) & np.isfinite(low))


def _tensor_scale(x: MXArray, format: BlockFormat, wanted: np.ndarray) -> np.ndarray:
    ones = np.ones((1,) * x.ndim)
    if not format.tensor_scale:
        return ones
    fractions, exponents = np.frexp(wanted[(wanted > 0) & np.isfinite(wanted)])
    if (fractions != 0.5).any():
        return ones if x.tensor_scale is None else np.asarray(x.tensor_scale, np.float64)
    largest = int(exponents.max()) - 1 if exponents.size else _LARGEST_POWER
    return np.ldexp(ones, max(largest - _LARGEST_POWER, _SMALLEST_NORMAL))


def single_tensor_scale(x: MXArray) -> float | None:
    """The tensor scale as a number, the first of several; None where there is none."""
    return None if x.tensor_scale is None else float(np.asarray(x.tensor_scale).flat[0])
