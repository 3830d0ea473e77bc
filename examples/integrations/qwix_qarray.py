"""Qwix's QArray as an MXArray and back: the same numbers, or an error. Copy this file.

Elements in their own dtype, float scales: `value = qvalue * scale`. Source: Qwix 0.1.8.

    x = from_qarray(qwix.quantize(w, "mxfp8", tiled_axes={0: 32}))
    array = to_qarray(mx_jax.quantize(w, "mxfp4", axis=0))
"""

import importlib
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.checkpoint.scales import effective_scales, encoded_scales, float32_blocks
from mx_jax.codecs.blocks import Blocks, block_extent
from mx_jax.formats.block import known_block
from mx_jax.mxarray import MXArray

# What Qwix calls formats of blocks by their name. All others it calls by the dtype of the elements.
_NAMED = {"mxfp8": formats.MXFP8_E4M3, "mxfp4": formats.MXFP4, "nvfp4": formats.NVFP4_ONE_LEVEL}
_ELEMENTS = {
    element.dtype: element for element in (formats.E4M3, formats.E5M2, formats.E2M1, formats.INT8)
}
_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


def from_qarray(array: Any, *, format: formats.BlockFormat | str | None = None) -> MXArray:
    """A `qwix.QArray` as an MXArray of the same values.

    Args:
      array: a QArray with concrete arrays.
      format: of the MXArray; default: Qwix's own name for it (`"mxfp8"`, `"mxfp4"`,
        `"nvfp4"`), else the elements with float32 scales, blocks as the tiles are. `"mxfp8_e4m3"`
        asks for E8M0 scales where Qwix says no more than `float8_e4m3fn`.

    Returns:
      An MXArray of array's shape, with the dtype of its scales.

    Raises:
      ValueError: a zero point, elements, tiles or scales that the format does not have.
    """
    if getattr(array, "zero_point", None) is not None:
        _refuse("an MXArray has no zero point; quantize with calibration_method='absmax'")
    element = _ELEMENTS.get(np.asarray(array.qvalue).dtype)
    if element is None:
        known = ", ".join(dtype.name for dtype in _ELEMENTS)
        _refuse(f"elements must be of {known}, got {array.qvalue.dtype}, qtype={array.qtype!r}")
    shape, scale = tuple(array.qvalue.shape), np.asarray(array.scale)
    if scale.dtype not in _DTYPES or scale.ndim != len(shape):
        _refuse(f"scales must be floats of qvalue's rank, got {scale.dtype}{list(scale.shape)}")
    values = scale.astype(np.float64)
    odd = ~np.isfinite(values) | (values < 0)
    if odd.any():
        _refuse(f"scales must be finite and not negative, got scale={values[odd][:4]}")
    if element is formats.INT8:
        # MX's INT8 has six bits behind its point, Qwix's none.
        values = values * 64
    counted = list(zip(shape, scale.shape, strict=True))
    if any(count < 1 or length % count for length, count in counted):
        _refuse(f"tiles must divide their axis, got shape={shape}, scale.shape={scale.shape}")
    # Of each axis, from the end, with tiles of more than one: their size and their number.
    tiles = {
        axis - len(shape): (length // count, count)
        for axis, (length, count) in enumerate(counted)
        if length != count
    }
    if format is None and isinstance(array.qtype, str):
        format = _NAMED.get(array.qtype)
    made = _with_float32(element, tiles) if format is None else formats.block_format(format)
    if made.element != element or made.tensor_scale:
        _refuse(f"format={made.name} has other elements, or a tensor scale; got {element.name}")
    blocks = _blocks(tiles, made)
    for axis in tiles.keys() - dict(blocks).keys():
        # One scale for all of an axis is one for each position of it.
        values = np.repeat(values, shape[axis], axis)
    stored, same = encoded_scales(values, made.scale)
    if not same.all():
        _refuse(
            f"format={made.name} has scales in {made.scale.name}, got scale={values[~same][:4]}"
        )
    codes = np.asarray(array.qvalue).view(np.uint8) & ((1 << element.bits) - 1)
    return MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(stored),
        format=made,
        blocks=blocks,
        dtype=scale.dtype,
    )


def to_qarray(x: MXArray, *, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """An MXArray as a `qwix.QArray` of the same values.

    Args:
      x: an MXArray with concrete arrays, elements of 8 or 4 bits, blocks that divide its axes.
      dtype: of the scales, and so of what Qwix computes; default: x's.

    Returns:
      A QArray; its `qtype` is Qwix's name where it has one for the format.

    Raises:
      ValueError: elements, blocks or scales that a QArray does not have.
      ImportError: Qwix is not installed.
    """
    if not isinstance(x, MXArray):
        raise TypeError(f"to_qarray: needs an MXArray, got {type(x).__name__}")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    element = x.format.element
    if element.dtype_name is None or element.bits not in (4, 8):
        _refuse(f"Qwix has no elements of {element.name}, got format={x.format.name}", "to_qarray")
    if any(x.shape[axis] % block_extent(size, x.shape[axis]) for axis, size in x.blocks):
        rule = f"tiles must divide their axis, got shape={x.shape}, blocks={x.blocks}"
        _refuse(rule, "to_qarray")
    exact = effective_scales(x)
    exact = exact / 64 if element.kind == "int" else exact
    if x.format.scale.kind == "divisor" and (np.frexp(exact)[0] != 0.5).any():
        _refuse(f"only powers of two divide exactly, got format={x.format.name}", "to_qarray")
    scale = exact.astype(dtype)
    lost = (scale.astype(np.float64) != exact) | (exact < float(jnp.finfo(dtype).tiny))
    if (lost & (exact != 0)).any():
        _refuse(
            f"scales must be normal numbers of dtype={dtype.name}, got {exact[lost][:4]}, "
            f"format={x.format.name}; another dtype may have them",
            "to_qarray",
        )
    known = known_block(x.format)
    names = [name for name, format in _NAMED.items() if known == format]
    qtype = names[0] if names else x.elements.dtype
    try:
        made: Any = importlib.import_module("qwix").QArray
    except ImportError as error:
        raise ImportError(f"to_qarray: needs Qwix: pip install qwix ({error})") from error
    return made(qvalue=x.elements, scale=jnp.asarray(scale), zero_point=None, qtype=qtype)


def _refuse(rule: str, operation: str = "from_qarray") -> NoReturn:
    raise ValueError(f"{operation}: no exact twin: {rule}")


def _with_float32(
    element: formats.ElementFormat, tiles: dict[int, tuple[int, int]]
) -> formats.BlockFormat:
    """The format with float32 scales and these tiles; a tile that fills its axis is WHOLE."""
    sizes: list[formats.BlockSize] = [
        formats.WHOLE if count == 1 else size for size, count in tiles.values()
    ]
    distinct = list(dict.fromkeys(sizes))
    if len(distinct) > 2:
        _refuse(f"at most two sizes of tiles, got {distinct}")
    first, last = [1, 1, *sizes][-2:] if len(sizes) < 2 else (distinct[0], distinct[-1])
    return float32_blocks("qwix", element, (first, last))


def _blocks(tiles: dict[int, tuple[int, int]], format: formats.BlockFormat) -> Blocks:
    """Axes with the format's sizes; ValueError if the tiles are not the format's."""
    left = [size for size in format.block if size != 1]
    blocks: list[tuple[int, formats.BlockSize]] = []
    for axis, (size, count) in tiles.items():
        fits = [block for block in left if block == size or (block is formats.WHOLE and count == 1)]
        if not fits and count == 1 and 1 in format.block:
            continue
        if not fits:
            _refuse(f"format={format.name} has blocks of {format.block}, got tiles={tiles}")
        if fits[0] is not formats.WHOLE:
            # The scale of a whole tensor spans any number of axes, others one each.
            left.remove(fits[0])
        blocks.append((axis, fits[0]))
    if any(size is not formats.WHOLE for size in left):
        _refuse(f"format={format.name} has blocks of {format.block}, got tiles={tiles}")
    return tuple(blocks)
