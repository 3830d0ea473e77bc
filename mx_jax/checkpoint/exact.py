"""MXArrays decoded on the host in float64, which holds every product of theirs exactly."""

from collections.abc import Iterator

import numpy as np

from mx_jax.codecs.blocks import block_extent
from mx_jax.mxarray import MXArray

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
