"""Indexing and transposing a blocked tensor: what happens to its codes, scales and blocks."""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from mx_jax.codecs.blocks import Blocks, num_blocks
from mx_jax.formats import WHOLE, BlockSize

_REMEDY = "dequantize() first, or index whole blocks"


class Indexed(NamedTuple):
    """Index tuples for the codes and the scales of one expression, and the resulting blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]
    blocks: Blocks


def index_blocks(index: Any, shape: tuple[int, ...], blocks: Blocks) -> Indexed:
    """Translate `x[index]` to codes and scales.

    Axes without blocks take ints and any slice; the first axis also takes an integer array (a
    gather of rows). A blocked axis takes slices that cut between blocks; a WHOLE one any slice.

    Args:
      index: what stands between the brackets.
      shape: logical shape.
      blocks: axes from the end with block sizes.

    Returns:
      An `Indexed`.

    Raises:
      IndexError: an index that would cut a block, or is of a kind that blocks do not allow.
    """
    items = _complete(index, len(shape))
    sizes = dict(blocks)
    codes: list[Any] = []
    scales: list[Any] = []
    # For each axis of the result, the block size it has, or None.
    result: list[BlockSize | None] = []
    axis = -len(shape)
    for item in items:
        if item is None:
            codes.append(None)
            scales.append(None)
            result.append(None)
            continue
        code_item, scale_item, kept = _index_axis(item, axis, shape[axis], sizes.get(axis))
        codes.append(code_item)
        scales.append(scale_item)
        result += kept
        axis += 1
    _check_arrays(items)
    ndim = len(result)
    new_blocks = tuple((i - ndim, size) for i, size in enumerate(result) if size is not None)
    return Indexed(tuple(codes), tuple(scales), new_blocks)


def index_tensor_scale(tensor_scale: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    """Apply a codes index to a tensor scale, whose axes of one stand for any position."""
    items: list[Any] = []
    axis = 0
    for item in index:
        if item is None:
            items.append(None)
            continue
        single = tensor_scale.shape[axis] == 1
        if single and isinstance(item, slice):
            item = slice(None)
        elif single:
            item = 0 if np.ndim(item) == 0 else np.zeros(np.shape(item), np.int32)
        items.append(item)
        axis += 1
    return tensor_scale[tuple(items)]


def transpose(x: Any, axes: tuple[Any, ...]) -> Any:
    """An MXArray with its axes permuted; see `MXArray.transpose`."""
    order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    order = tuple(order) or tuple(range(x.ndim))[::-1]
    in_range = all(-x.ndim <= axis < x.ndim for axis in order)
    order = tuple(axis % x.ndim for axis in order) if in_range else order
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"MXArray.transpose: axes={axes} do not permute ndim={x.ndim}")

    def move(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else array.transpose(order)

    return dataclasses.replace(
        x,
        codes=move(x.codes),
        scales=move(x.scales),
        tensor_scale=move(x.tensor_scale),
        blocks=transpose_blocks(order, x.blocks),
        primal=move(x.primal),
    )


def transpose_blocks(axes: tuple[int, ...], blocks: Blocks) -> Blocks:
    """The blocks of `x.transpose(axes)`; axes are non-negative."""
    sizes = dict(blocks)
    ndim = len(axes)
    moved = ((i - ndim, sizes.get(axis - ndim)) for i, axis in enumerate(axes))
    return tuple((axis, size) for axis, size in moved if size is not None)


def _complete(index: Any, ndim: int) -> list[Any]:
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > ndim:
        raise IndexError(f"MXArray index: too many indices, got {used} for ndim={ndim}")
    fill = [slice(None)] * (ndim - used)
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"MXArray index: only one ellipsis is allowed, got index={index!r}")
    if dots:
        return items[: dots[0]] + fill + items[dots[0] + 1 :]
    return items + fill


def _check_arrays(items: list[Any]) -> None:
    """A gather may only take rows: elsewhere, NumPy's rules would move axes about."""
    arrays = [i for i, item in enumerate(items) if not isinstance(item, slice) and np.ndim(item)]
    if arrays and arrays != [0]:
        raise IndexError(
            "MXArray index: takes ints, slices, None, an ellipsis and, on the first axis, an "
            f"integer array; got an array at position {arrays[-1]}; {_REMEDY}"
        )


def _index_axis(
    item: Any, axis: int, length: int, size: BlockSize | None
) -> tuple[Any, Any, list[BlockSize | None]]:
    if isinstance(item, slice):
        if size is None:
            return item, item, [None]
        return item, _slice_scales(item, axis, length, size), [size]
    is_mask = isinstance(item, bool) or getattr(item, "dtype", None) == np.dtype(bool)
    if is_mask or isinstance(item, list):
        raise IndexError(
            "MXArray index: takes ints, slices, None, an ellipsis and, on the first axis, an "
            f"integer array; got {item!r} on axis={axis}; {_REMEDY}"
        )
    if size is not None:
        raise IndexError(
            f"MXArray index: axis={axis} is cut into blocks of {size}, which share a scale, and "
            f"takes slices only; got index={item!r}; {_REMEDY}"
        )
    if np.ndim(item) == 0:
        item = item if isinstance(item, jax.Array) else operator.index(item)
        return item, item, []
    return item, item, [None] * np.ndim(item)


def _slice_scales(item: slice, axis: int, length: int, size: BlockSize) -> slice:
    start, stop, step = item.indices(length)
    if size is WHOLE:
        empty = len(range(start, stop, step)) == 0
        return slice(0, 0) if empty else slice(None)
    size = int(size)
    if step != 1 or start % size or (stop % size and stop != length and stop > start):
        raise IndexError(
            f"MXArray index: axis={axis} of length={length} is cut into blocks of {size}; a slice "
            f"must start and stop between blocks with step 1, got {start}:{stop}:{step}; {_REMEDY}"
        )
    return slice(start // size, num_blocks(size, max(stop, start)))
