"""Scales of files, checked; exact values in float64; and whether they are plausible weights."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.files import Entry
from mx_jax.codecs import blocks, packing
from mx_jax.formats import F32, BlockFormat, BlockSize, ElementFormat, ScaleFormat
from mx_jax.formats.block import known_block
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# Formats with a tensor scale are NVFP4: its largest element times its largest block scale.
_NVFP4_MAX = 6.0 * 448.0


def float32_blocks(
    prefix: str, element: ElementFormat, block: tuple[BlockSize, BlockSize]
) -> BlockFormat:
    """The format of elements in blocks under float32 scales, by its known name if it has one."""
    name = "x".join(str(getattr(size, "value", size)) for size in block)
    name = f"{prefix}_{name}_{element.name}"
    made = BlockFormat(name=name, element=element, scale=F32, block=block)
    return known_block(made) or made


def bad_scales(stored: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Which scales, as they are stored, are NaN, infinite or negative."""
    if format.scale.is_float32:
        scales = stored.astype(np.float32)
        return ~np.isfinite(scales) | (scales < 0)
    # E8M0 has one NaN; E4M3 has a sign, which no scale bears, and a NaN for each.
    codes = stored.view(np.uint8)
    return codes == 0xFF if format.scale.kind == "exponent" else codes >= 0x7F


def stored_parts(
    x: MXArray,
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype],
    *,
    scale_shape: tuple[int, ...],
    divides: bool = False,
) -> list[Entry]:
    """A weight's codes, of that shape and dtype, scales and tensor scale, as others store them."""
    bits = 8 * math.prod(shape) // max(x.size, 1)

    def codes() -> np.ndarray:
        return packing.pack(np.asarray(x.codes), bits).reshape(shape).view(dtypes[0])

    def whole() -> np.ndarray:
        value = small_tensor_scale(x, name, divides).reshape(scale_shape)
        return np.asarray(1 / value if divides else value)

    scales = Entry(x.scales.shape, dtypes[1], lambda: finite_scales(x, name).view(dtypes[1]))
    entries = [Entry(shape, dtypes[0], codes), scales]
    if x.tensor_scale is not None:
        entries.append(Entry(scale_shape, np.dtype(np.float32), whole))
    return entries


def finite_scales(x: MXArray, name: str) -> np.ndarray:
    """The scales of a weight that is written for others, who expect no block that is no number."""
    scales = np.asarray(x.scales)
    bad = bad_scales(scales, x.format)
    if bad.any():
        raise ValueError(
            f"checkpoint.write: {name} has {int(bad.sum())} of {bad.size} blocks whose scales are "
            "NaN, infinite or negative, which a reader takes for damage; repair the weight, or "
            "save it in mx_jax's own files"
        )
    return scales


def small_tensor_scale(x: MXArray, name: str, divides: bool = False) -> np.ndarray:
    """The tensor scale of a weight that is written; ValueError for one that readers misread."""
    scale = np.asarray(x.tensor_scale)
    if (largest := float(np.max(scale))) > 1:
        raise ValueError(
            f"checkpoint.write: {name} has tensor_scale={largest:g}, for values beyond "
            f"{_NVFP4_MAX:g}; readers take one above 1 for the inverse; scale the weight down, or "
            "save it in mx_jax's own files"
        )
    with np.errstate(all="ignore"):
        inverse = 1 / scale
    if divides and not np.isfinite(inverse).all():
        raise ValueError(
            f"checkpoint.write: {name} has tensor_scale={float(scale.min()):g}, whose reciprocal, "
            "which this layout stores, is beyond float32; scale the weight up, or take a layout "
            "that stores the factor, as modelopt-nvfp4"
        )
    return scale


def block_scales(stored: np.ndarray, format: BlockFormat, where: str) -> np.ndarray:
    """Block scales as an MXArray has them; ValueError for what is no scale."""
    bad = bad_scales(stored, format)
    if bad.any():
        raise ValueError(
            f"{where}: {int(bad.sum())} of {bad.size} scales are NaN, infinite or negative; the "
            "file is damaged, or its scales are of another format"
        )
    return stored.astype(np.float32) if format.scale.is_float32 else stored.view(np.uint8)


def tensor_scale(
    stored: np.ndarray, shape: tuple[int, ...], *, divides: bool, layout: str, where: str
) -> np.ndarray:
    """What codes are multiplied by: float32 `[1, ..., 1]`, or `[experts, 1, 1]` of three axes."""
    values = stored.astype(np.float32).reshape(-1)
    each = len(shape) == 3 and values.size == shape[0]
    if not (values.size == 1 or each) or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"{where}: the tensor scale must be one positive number, got {values[:4]} of "
            f"shape={stored.shape}"
        )
    factors = np.float32(1) / values if divides else values
    if (factors > 1).any():
        raise ValueError(
            f"{where}: {layout} stores what a tensor is {'divided' if divides else 'multiplied'} "
            f"by, and {values[factors.argmax()]} makes weights of up to "
            f"{factors.max() * _NVFP4_MAX:g}: it is the other way around; is it another layout?"
        )
    return factors.reshape(-1 if each else 1, *(1,) * (len(shape) - 1))


# Elements that are decoded at once: little memory, however large the tensor.
_CHUNK = 1 << 20


def effective_scales(x: MXArray) -> np.ndarray:
    """What each block's codes are multiplied by, in float64: exact, but for divisors."""
    scales = np.asarray(x.scales)
    if not x.format.scale.is_float32:
        scales = np.array([x.format.scale.value(code) for code in range(256)])[scales]
    if x.format.scale.kind == "divisor":
        scales = 1 / scales.astype(np.float64)
    whole = 1.0 if x.tensor_scale is None else np.asarray(x.tensor_scale, np.float64)
    return scales.astype(np.float64) * whole


def element_values(x: MXArray) -> np.ndarray:
    """The value of each code, by code."""
    element = x.format.element
    return np.array([element.value(code) for code in range(1 << element.bits)])


def encoded_scales(wanted: np.ndarray, scale: ScaleFormat) -> tuple[np.ndarray, np.ndarray]:
    """Scales in float64 as they are stored, and which of them are what was wanted, exactly; scales
    that multiply."""
    if scale.is_float32:
        with np.errstate(all="ignore"):
            stored = wanted.astype(np.float32)
        return stored, stored == wanted
    table = np.array([scale.value(code) for code in range(256)])
    # No scale bears a sign, and the highest codes are NaN.
    fits = np.flatnonzero(np.isfinite(table) & ~np.signbit(table))
    order = fits[np.argsort(table[fits], kind="stable")]
    places = np.minimum(np.searchsorted(table[order], wanted), order.size - 1)
    stored = order[places].astype(np.uint8)
    return stored, table[stored] == wanted


def decoded(x: MXArray) -> Iterator[np.ndarray]:
    """The values in float64, some rows of the first axis at a time."""
    table, scales, codes = element_values(x), effective_scales(x), np.asarray(x.codes)
    if not x.ndim:
        yield table[codes.reshape(1)] * scales
        return
    extents = {axis % x.ndim: blocks.block_extent(size, x.shape[axis]) for axis, size in x.blocks}
    step = max(1, _CHUNK * x.shape[0] // max(codes.size, 1))
    for first in range(0, x.shape[0], step):
        rows = np.arange(first, min(first + step, x.shape[0]))
        shared = scales[rows // extents.get(0, 1)]
        for axis in range(1, x.ndim):
            shared = np.take(shared, np.arange(x.shape[axis]) // extents.get(axis, 1), axis)
        yield table[codes[rows]] * shared


def real_pairs(x: np.ndarray) -> np.ndarray:
    """Complex numbers as pairs of real ones along a last axis of two; others as they are."""
    if x.dtype.kind != "c":
        return x
    return np.stack([np.real(x), np.imag(x)], axis=-1)


# Trained weights are well within these; a tensor scale that is taken the other way around, or
# twice, does not.
_LARGEST, _SMALLEST = 1e3, 1e-6
_MANY_ZEROS, _MANY_SATURATED = 0.9, 0.5
# Bytes that are no scales spread over all of E8M0.
_OCTAVES = 40
# Fewer blocks than these may well have one scale.
_BLOCKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plausibility:
    """What a tensor looks like.

    Attributes:
      amax: largest finite magnitude.
      zeros: share of values that are zero.
      saturated: share of codes with the largest magnitude that their format has; 0 of plain arrays.
      not_finite: number of values that are NaN or infinite.
      octaves: from the smallest to the largest scale of blocks that are not all zero, in powers of
        two; 0 of plain arrays.
      warnings: what is out of the ordinary, in words; empty of ordinary weights.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> q = mx_jax.quantize(jnp.full((2, 32), 4e4), "mxfp4")
      >>> result = mx_jax.checkpoint.plausibility(q)
      >>> result.amax, result.zeros, result.not_finite
      (32768.0, 0.0, 0)
      >>> print(result.warnings[0])
      the largest value is 3.28e+04, which few weights have: is a scale of it taken the ...
    """

    amax: float
    zeros: float
    saturated: float
    not_finite: int
    octaves: float
    warnings: tuple[str, ...]


def plausibility(x: Quantized | jax.Array | np.ndarray) -> Plausibility:
    """Look at a tensor that was read: its largest value, zeros, saturation, and what is odd.

    Nothing here is an error. `read` refuses what cannot be; this finds what may be but seldom is.

    Args:
      x: quantized, or a plain array of numbers.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> result = checkpoint.plausibility(mx_jax.quantize(jnp.zeros((2, 32)), "mxfp4"))
      >>> result.zeros, result.warnings
      (1.0, ('all values are zero',))
    """
    if isinstance(x, Quantized):
        array = unpacked(x)
        magnitudes = np.asarray(array.codes) & (array.format.element.sign_code - 1)
        largest = int((magnitudes == array.format.element.max_code).sum())
        saturated = largest / max(array.size, 1)
        flat, parts, (octaves, odd) = array, decoded(array), _scales(array, magnitudes)
    else:
        flat = real_pairs(np.asarray(x)).reshape(-1)
        parts = (flat[at : at + _CHUNK].astype(np.float64) for at in range(0, flat.size, _CHUNK))
        saturated, octaves, odd = 0.0, 0.0, []
    amax, zeros, finite, size = 0.0, 0, 0, flat.size
    for values in parts:
        good = np.abs(values[np.isfinite(values)])
        amax = max(amax, float(good.max(initial=0)))
        zeros += int((good == 0).sum())
        finite += good.size
    share = zeros / max(size, 1)
    warnings = [f"{size - finite} of {size} values are NaN or infinite"] if finite < size else []
    warnings += odd
    if size and zeros == size:
        warnings.append("all values are zero")
    elif share > _MANY_ZEROS:
        warnings.append(f"{share:.1%} of the values are zero")
    if amax > _LARGEST or 0 < amax < _SMALLEST:
        warnings.append(
            f"the largest value is {amax:.3g}, which few weights have: is a scale of it taken the "
            "other way around, or twice?"
        )
    if saturated > _MANY_SATURATED:
        warnings.append(f"{saturated:.1%} of the codes have the largest magnitude of their format")
    return Plausibility(
        amax=amax,
        zeros=share,
        saturated=saturated,
        not_finite=size - finite,
        octaves=octaves,
        warnings=tuple(warnings),
    )


def _scales(x: MXArray, magnitudes: np.ndarray) -> tuple[float, list[str]]:
    """Octaves that the scales of blocks that are not all zero span, and what is odd about them."""
    scales, odd = effective_scales(x), []
    bad = int((~np.isfinite(scales) | (scales < 0)).sum())
    if bad:
        odd.append(f"{bad} of {scales.size} scales are NaN, infinite or negative")
    pieces, inside = blocks.split(jnp.asarray(magnitudes != 0), x.blocks)
    holds_values = np.asarray(pieces.any(axis=inside))
    used = scales[np.isfinite(scales) & (scales > 0) & holds_values]
    octaves = float(np.log2(used.max() / used.min())) if used.size else 0.0
    if octaves > _OCTAVES:
        odd.append(f"the scales span {octaves:.0f} octaves: are they scales of this format?")
    if scales.size >= _BLOCKS and used.size == scales.size and octaves == 0:
        odd.append(f"all {scales.size} scales are equal")
    return octaves, odd
