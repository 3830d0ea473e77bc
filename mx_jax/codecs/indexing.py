"""Indexing, transposing and reshaping a blocked tensor where every block stays whole."""

import dataclasses
import math
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs.blocks import Blocked, Blocks, num_blocks, scales_shape
from mx_jax.formats import WHOLE, BlockSize, Whole

Shape = tuple[int, ...]
Index = int | slice | types.EllipsisType | None | jax.Array | np.ndarray | Sequence[int]
B = TypeVar("B", bound=Blocked)

_REMEDY = "dequantize() first, or index whole blocks"


class Indexed(NamedTuple):
    """Index tuples for the codes and the scales of one expression, and the resulting blocks."""

    codes: tuple[Any, ...]
    scales: tuple[Any, ...]
    blocks: Blocks


def index_blocks(
    index: Index | tuple[Index, ...], shape: tuple[int, ...], blocks: Blocks
) -> Indexed:
    """Translate `x[index]` to codes and scales; IndexError where it would cut a block."""
    # Axes without blocks take ints and any slice, the first one also an integer array (a gather of
    # rows). A blocked axis takes slices that cut between blocks; a WHOLE one any slice.
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > len(shape):
        raise IndexError(f"MXArray index: too many indices, got {used} for ndim={len(shape)}")
    dots = [i for i, item in enumerate(items) if item is Ellipsis] or [len(items)]
    if len(dots) > 1:
        raise IndexError(f"MXArray index: only one ellipsis is allowed, got index={index!r}")
    items[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - used)
    sizes = dict(blocks)
    codes: list[Any] = []
    scales: list[Any] = []
    # For each axis of the result, the block size it has, or None.
    result: list[BlockSize | None] = []
    axis = -len(shape)
    for item in items:
        if item is None:
            code_item, scale_item, kept = None, None, [None]
        else:
            code_item, scale_item, kept = _index_axis(item, axis, shape[axis], sizes.get(axis))
            axis += 1
        codes.append(code_item)
        scales.append(scale_item)
        result += kept
    # A gather may only take rows: elsewhere, NumPy's rules would move axes about.
    arrays = [i for i, item in enumerate(items) if not isinstance(item, slice) and np.ndim(item)]
    if arrays and arrays != [0]:
        raise IndexError(
            "MXArray index: takes ints, slices, None, an ellipsis and, on the first axis, an "
            f"integer array; got an array at position {arrays[-1]}; {_REMEDY}"
        )
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


def transpose(x: B, axes: tuple[Any, ...]) -> B:
    """An MXArray with its axes permuted; see `MXArray.transpose`."""
    ndim = x.codes.ndim
    order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
    order = tuple(order) or tuple(range(ndim))[::-1]
    in_range = all(-ndim <= axis < ndim for axis in order)
    order = tuple(axis % ndim for axis in order) if in_range else order
    if sorted(order) != list(range(ndim)):
        raise ValueError(f"MXArray.transpose: axes={axes} do not permute ndim={ndim}")
    sizes = dict(x.blocks)
    moved = ((i - ndim, sizes.get(axis - ndim)) for i, axis in enumerate(order))

    def move(array: jax.Array | None) -> jax.Array | None:
        return None if array is None else array.transpose(order)

    return dataclasses.replace(
        x,
        codes=move(x.codes),
        scales=move(x.scales),
        tensor_scale=move(x.tensor_scale),
        blocks=tuple((axis, size) for axis, size in moved if size is not None),
        primal=move(x.primal),
    )


def _index_axis(
    item: SupportsIndex | slice | jax.Array | np.ndarray | list[int],
    axis: int,
    length: int,
    size: BlockSize | None,
) -> tuple[Any, Any, list[BlockSize | None]]:
    """An item for codes, one for scales, and the block sizes of the axes that are left of one."""
    if isinstance(item, slice):
        if size is None:
            return item, item, [None]
        start, stop, step = item.indices(length)
        if isinstance(size, Whole):
            return item, slice(None) if range(start, stop, step) else slice(0, 0), [size]
        if step != 1 or start % size or (stop % size and stop != length and stop > start):
            raise IndexError(
                f"MXArray index: axis={axis} of length={length} is cut into blocks of {size}; a "
                f"slice must start and stop between blocks with step 1, got {start}:{stop}:{step}; "
                f"{_REMEDY}"
            )
        return item, slice(start // size, num_blocks(size, max(stop, start))), [size]
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
    places: Any = item
    if np.ndim(places) == 0 and not isinstance(places, jax.Array):
        if not hasattr(places, "__index__"):
            raise TypeError(f"MXArray index: needs ints, got {item!r} on axis={axis}; {_REMEDY}")
        places = operator.index(places)
    return places, places, [None] * np.ndim(places)


# Reshaping ----------------------------------------------------------------------------------------


_PRIME = 2**61 - 1


class Reshaped(NamedTuple):
    """Shapes of codes, of scales, and of a tensor scale (broadcast, and then); and blocks."""

    codes: Shape
    scales: Shape
    spread: Shape
    tensor_scale: Shape
    blocks: Blocks


def reshape(x: B, shape: Sequence[int | Sequence[int]], options: dict[str, Any]) -> B:
    """An MXArray in another shape; see `MXArray.reshape`."""
    if {name for name, value in options.items() if value is not None} != {"order"} or (
        options["order"] != "C"
    ):
        raise ValueError(
            f"MXArray.reshape: takes order='C' alone, got {options}; dequantize() first"
        )
    tensor_scale = x.tensor_scale
    scale_shape = None if tensor_scale is None else tensor_scale.shape
    to = reshape_blocks(shape, x.codes.shape, x.blocks, scale_shape)
    if tensor_scale is not None:
        tensor_scale = jnp.broadcast_to(tensor_scale, to.spread).reshape(to.tensor_scale)
    return dataclasses.replace(
        x,
        codes=x.codes.reshape(to.codes),
        scales=x.scales.reshape(to.scales),
        tensor_scale=tensor_scale,
        blocks=to.blocks,
        primal=None if x.primal is None else x.primal.reshape(to.codes),
    )


def reshape_blocks(
    wanted: Sequence[int | Sequence[int]], shape: Shape, blocks: Blocks, tensor_scale: Shape | None
) -> Reshaped:
    """What `x.reshape(wanted)` does to a blocked tensor, in row-major order."""
    # Axes that are joined or divided together form a group; in a group, blocks may only lie along
    # the last axis, in whole blocks, before and after.
    target: Any = wanted
    if len(wanted) == 1 and isinstance(wanted[0], Sequence):
        target = wanted[0]
    try:
        lengths = [operator.index(length) for length in target]
    except TypeError:
        raise TypeError(f"MXArray.reshape: lengths must be ints, got shape={target!r}") from None
    size, known = math.prod(shape), math.prod(length for length in lengths if length != -1)
    if lengths.count(-1) == 1 and known and size % known == 0:
        lengths[lengths.index(-1)] = size // known
    if any(length < 0 for length in lengths) or math.prod(lengths) != size:
        raise ValueError(
            f"MXArray.reshape: needs a shape of size={size}, got shape={tuple(target)} for an "
            f"array of shape={shape}"
        )
    new = tuple(lengths)
    if new == shape:
        scale_shape = tensor_scale or (1,) * len(shape)
        return Reshaped(new, scales_shape(new, blocks), scale_shape, scale_shape, blocks)
    # An axis without entries goes alone: no other length has its factor.
    before, after = (tuple(length or _PRIME for length in each) for each in (shape, new))
    if math.prod(before) != math.prod(after):
        raise _cut_error(new, shape, blocks)
    sizes = {axis % len(shape): size for axis, size in blocks}
    scale_shape = (1,) * len(shape) if tensor_scale is None else tensor_scale
    spread, lengths, new_sizes = list(scale_shape), [1] * len(new), {}
    for old_axes, new_axes in _groups(before, after, sizes):
        blocked = [axis for axis in old_axes if axis in sizes]
        if blocked:
            group_blocks = _blocks_of_group(old_axes, new_axes, before, after, sizes)
            if group_blocks is None:
                raise _cut_error(new, shape, blocks)
            new_sizes |= group_blocks
        if any(scale_shape[axis] != 1 for axis in old_axes):
            if len(old_axes) > 1 and blocked:
                raise _cut_error(new, shape, blocks)
            for axis in old_axes:
                spread[axis] = shape[axis]
            for axis in new_axes:
                lengths[axis] = new[axis]
    if sizes and all(sizes.get(axis) is WHOLE for axis in range(len(shape))):
        new_sizes = dict.fromkeys(range(len(new)), WHOLE)
    group_blocks = tuple((axis - len(new), size) for axis, size in sorted(new_sizes.items()))
    return Reshaped(
        new, scales_shape(new, group_blocks), tuple(spread), tuple(lengths), group_blocks
    )


def _groups(
    shape: Shape, new: Shape, sizes: dict[int, BlockSize]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of old and new axes of one size; not axes of one without blocks."""
    old_axes = [axis for axis, length in enumerate(shape) if length != 1 or axis in sizes]
    new_axes = [axis for axis, length in enumerate(new) if length != 1]
    while old_axes:
        if shape[old_axes[0]] == 1:
            yield [old_axes.pop(0)], []
            continue
        left, right = [old_axes.pop(0)], [new_axes.pop(0)]
        while (a := math.prod(shape[i] for i in left)) != (b := math.prod(new[i] for i in right)):
            if a < b:
                left.append(old_axes.pop(0))
            else:
                right.append(new_axes.pop(0))
        yield left, right


def _blocks_of_group(
    old_axes: list[int], new_axes: list[int], shape: Shape, new: Shape, sizes: dict[int, BlockSize]
) -> dict[int, BlockSize] | None:
    """The blocks of a group's new axes; None if some would not stay whole."""
    if all(sizes.get(axis) is WHOLE for axis in old_axes) and len(sizes) == len(shape):
        return {}
    if len(new_axes) == 1 and len(old_axes) == 1:
        return {new_axes[0]: sizes[old_axes[0]]}
    if any(axis in sizes for axis in old_axes[:-1]) or not new_axes:
        return None
    size = sizes[old_axes[-1]]
    if isinstance(size, Whole) or shape[old_axes[-1]] % size or new[new_axes[-1]] % size:
        return None
    return {new_axes[-1]: size}


def _cut_error(new: Shape, shape: Shape, blocks: Blocks) -> ValueError:
    return ValueError(
        f"MXArray.reshape: shape={new} would cut blocks, got shape={shape}, blocks={blocks}: axes "
        f"may be joined or divided where blocks lie along the last of them, in whole blocks; "
        f"dequantize() first, or reshape before quantizing"
    )
