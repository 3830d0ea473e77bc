"""Scales as files have them, checked; and MXArrays decoded in float64, which is exact."""

from collections.abc import Iterator

import numpy as np

from mx_jax.codecs.blocks import block_extent
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# Formats with a tensor scale are NVFP4: its largest element times its largest block scale.
_NVFP4_MAX = 6.0 * 448.0


def bad_scales(stored: np.ndarray, format: BlockFormat) -> np.ndarray:
    """Which scales, as they are stored, are NaN, infinite or negative."""
    if format.scale.is_float32:
        scales = stored.astype(np.float32)
        return ~np.isfinite(scales) | (scales < 0)
    # E8M0 has one NaN; E4M3 has a sign, which no scale bears, and a NaN for each.
    codes = stored.view(np.uint8)
    return codes == 0xFF if format.scale.kind == "exponent" else codes >= 0x7F


def finite_scales(x: MXArray, name: str) -> np.ndarray:
    """The scales of a weight that is written for others, who expect no block that is no number.

    Raises:
      ValueError: a scale that is NaN, infinite or negative; a tensor scale above 1, which
        `tensor_scale` takes for one that is stored the other way around.
    """
    if x.tensor_scale is not None and (largest := float(np.max(x.tensor_scale))) > 1:
        raise ValueError(
            f"checkpoint.write: {name} has tensor_scale={largest:g}, for values beyond "
            f"{_NVFP4_MAX:g}; readers take one above 1 for the inverse; scale the weight down, or "
            "save it in mx_jax's own files"
        )
    scales = np.asarray(x.scales)
    bad = bad_scales(scales, x.format)
    if bad.any():
        raise ValueError(
            f"checkpoint.write: {name} has {int(bad.sum())} of {bad.size} blocks whose scales are "
            "NaN, infinite or negative, which a reader takes for damage; repair the weight, or "
            "save it in mx_jax's own files"
        )
    return scales


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
    """What codes are multiplied by: one number for the tensor, or one for each of its experts.

    Args:
      stored: as it lies in the file.
      shape: of the weight; `[experts, out, in]` may have a number for each.
      divides: whether what is stored divides.
      layout: its name, for the error.
      where: how errors begin.

    Returns:
      float32 `[1, ..., 1]` or `[experts, 1, 1]`.

    Raises:
      ValueError: another count, no positive number, or one that is stored the other way around.
    """
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


def decoded(x: MXArray) -> Iterator[np.ndarray]:
    """The values in float64, some rows of the first axis at a time."""
    table, scales, codes = element_values(x), effective_scales(x), np.asarray(x.codes)
    if not x.ndim:
        yield table[codes.reshape(1)] * scales
        return
    extents = {axis % x.ndim: block_extent(size, x.shape[axis]) for axis, size in x.blocks}
    step = max(1, _CHUNK * x.shape[0] // max(codes.size, 1))
    for first in range(0, x.shape[0], step):
        rows = np.arange(first, min(first + step, x.shape[0]))
        shared = scales[rows // extents.get(0, 1)]
        for axis in range(1, x.ndim):
            shared = np.take(shared, np.arange(x.shape[axis]) // extents.get(axis, 1), axis)
        yield table[codes[rows]] * shared
