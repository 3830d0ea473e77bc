"""Indexing, transposing, reshaping and updating a blocked tensor where every block stays whole.

A tensor scale is never written: values under another one than the tensor's would be wrong, so they
are refused; what is only known when it runs becomes NaN.
"""

import dataclasses
import math
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocked, Blocks, check_parts, num_blocks, scales_shape
from mx_jax.codecs.scale import E8M0_NAN
from mx_jax.codecs.straight_through import parted_codes
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
    if np.ndim(places) == 0:
        places = places if isinstance(places, jax.Array) else operator.index(places)
    return places, places, [None] * np.ndim(places)


# Reshaping ----------------------------------------------------------------------------------------


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
    if 0 in shape:
        raise _cut(new, shape, blocks)
    sizes = {axis % len(shape): size for axis, size in blocks}
    scale_shape = (1,) * len(shape) if tensor_scale is None else tensor_scale
    spread, lengths, new_sizes = list(scale_shape), [1] * len(new), {}
    for old_axes, new_axes in _groups(shape, new, sizes):
        blocked = [axis for axis in old_axes if axis in sizes]
        if blocked:
            group_blocks = _blocks_of_group(old_axes, new_axes, shape, new, sizes)
            if group_blocks is None:
                raise _cut(new, shape, blocks)
            new_sizes |= group_blocks
        if any(scale_shape[axis] != 1 for axis in old_axes):
            if len(old_axes) > 1 and blocked:
                raise _cut(new, shape, blocks)
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


def _cut(new: Shape, shape: Shape, blocks: Blocks) -> ValueError:
    return ValueError(
        f"MXArray.reshape: shape={new} would cut blocks, got shape={shape}, blocks={blocks}: axes "
        f"may be joined or divided where blocks lie along the last of them, in whole blocks; "
        f"dequantize() first, or reshape before quantizing"
    )


# Updating -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class At(Generic[B]):
    """`x.at` of an MXArray, to be indexed."""

    array: B

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Region[B]":
        return Region(self.array, index)


@dataclasses.dataclass(frozen=True)
class Region(Generic[B]):
    """`x.at[index]`: whole blocks of an MXArray, to be set."""

    array: B
    index: Index | tuple[Index, ...]

    def set(self, values: B) -> B:
        """The MXArray with other blocks there: `values`, an MXArray of that shape."""
        x, operation = self.array, "MXArray.at[].set"
        indexed = index_blocks(self.index, x.codes.shape, x.blocks)
        here = jax.eval_shape(lambda codes: codes[indexed.codes], x.codes)
        _check_values(values, x, here.shape, indexed.blocks, operation)
        tensor_scale = x.tensor_scale
        if tensor_scale is not None:
            tensor_scale = index_tensor_scale(tensor_scale, indexed.codes)
        scales = _valid_scales(values, _same_bits(tensor_scale, values, operation))
        return dataclasses.replace(
            x,
            codes=parted_codes(x).at[indexed.codes].set(parted_codes(values)),
            scales=x.scales.at[indexed.scales].set(scales),
            primal=None,
        )


def dynamic_update_slice(x: B, update: B, start_indices: Sequence[Any]) -> B:
    """See `MXArray.dynamic_update_slice`."""
    operation = "MXArray.dynamic_update_slice"
    if len(start_indices) != len(x.codes.shape):
        raise ValueError(
            f"{operation}: needs a start for each axis, got {len(start_indices)} starts for "
            f"shape={x.codes.shape}"
        )
    _check_values(update, x, update.codes.shape, x.blocks, operation)
    starts = [jnp.asarray(start) for start in start_indices]
    code_starts, scale_starts = list(starts), list(starts)
    inside: dict[int, jax.Array] = {}  # of axes in blocks, whether the start is inside one
    for axis, size in x.blocks:
        length, written_length = x.codes.shape[axis], update.codes.shape[axis]
        whole = written_length == length
        if not whole and (isinstance(size, Whole) or written_length % size or length % size):
            raise ValueError(
                f"{operation}: axis={axis} has blocks of {size!r}, which are written whole, got "
                f"shape={x.codes.shape}, update.shape={update.codes.shape}; write whole blocks"
            )
        if whole or isinstance(size, Whole):
            scale_starts[axis] = jnp.zeros_like(starts[axis])
            continue
        inside[axis] = starts[axis] % size != 0
        if not isinstance(inside[axis], Tracer) and bool(inside[axis]):
            raise ValueError(
                f"{operation}: a start must lie between blocks of {size}, got "
                f"start={starts[axis]} on axis={axis}; use a multiple of {size}"
            )
        scale_starts[axis] = starts[axis] // size
        code_starts[axis] = scale_starts[axis] * size
    written = _valid_scales(update, _same_bits(x.tensor_scale, update, operation))
    scales = lax.dynamic_update_slice(x.scales, written, scale_starts)
    if any(isinstance(start, Tracer) for start in inside.values()):
        scales = _mark_cut(scales, written.shape, scale_starts, inside, _nan_scale(x))
    codes, values = parted_codes(x), parted_codes(update)
    return dataclasses.replace(
        x, codes=lax.dynamic_update_slice(codes, values, code_starts), scales=scales, primal=None
    )


def _mark_cut(
    scales: jax.Array,
    written: Shape,
    starts: Sequence[jax.Array],
    inside: dict[int, jax.Array],
    nan: np.ndarray,
) -> jax.Array:
    """Scales with NaN for all blocks that a start inside of one touches: one more on its axis."""
    ndim, first, corner, sizes = scales.ndim, [], [], []
    for axis, (start, length, count) in enumerate(zip(starts, scales.shape, written, strict=True)):
        start = jnp.where(start < 0, start + length, start)
        first.append(jnp.clip(start, 0, length - count))
        sizes.append(min(count + (axis - ndim in inside), length))
        corner.append(jnp.minimum(first[axis], length - sizes[axis]))
    cut = jnp.stack(list(inside.values())).any()
    for axis in range(ndim):
        block = lax.broadcasted_iota(np.int32, sizes, axis) + corner[axis] - first[axis]
        cut &= (block >= 0) & (block < written[axis] + inside.get(axis - ndim, 0))
    part = jnp.where(cut, nan, lax.dynamic_slice(scales, corner, sizes))
    return lax.dynamic_update_slice(scales, part, corner)


def _check_values(values: object, x: Blocked, shape: Shape, blocks: Blocks, operation: str) -> None:
    """Raise unless values are an MXArray that may stand in that part of x."""
    if not isinstance(values, type(x)):
        raise TypeError(
            f"{operation}: needs an MXArray, got values of type {type(values).__name__}; quantize "
            f"them first, format={x.format.name}, with blocks={blocks}"
        )
    check_parts(values, operation)
    facts = (values.codes.shape, values.format, sorted(values.blocks))
    if facts != (shape, x.format, sorted(blocks)):
        raise ValueError(
            f"{operation}: values must have the format, the shape and the blocks of what they "
            f"replace, format={x.format.name}, shape={shape}, blocks={blocks}, got "
            f"format={values.format.name}, shape={values.codes.shape}, blocks={values.blocks}; "
            "quantize them likewise"
        )


def _same_bits(tensor_scale: jax.Array | None, values: Blocked, operation: str) -> jax.Array:
    """Whether values are under that tensor scale; raises if they are known not to be."""
    if tensor_scale is None:
        return jnp.bool_(True)
    assert values.tensor_scale is not None
    same = (float32.to_bits(tensor_scale) == float32.to_bits(values.tensor_scale)).all()
    if not isinstance(same, Tracer) and not bool(same):
        raise ValueError(
            f"{operation}: values must be under the array's tensor scale, got "
            f"tensor_scale={np.asarray(tensor_scale)} and values.tensor_scale="
            f"{np.asarray(values.tensor_scale)}; quantize them with tensor_scale=x.tensor_scale"
        )
    return same


def _valid_scales(values: Blocked, valid: jax.Array) -> jax.Array:
    """The scales of values, or those that make blocks NaN."""
    return jnp.where(valid, values.scales, _nan_scale(values))


def _nan_scale(x: Blocked) -> np.ndarray:
    """The scale that makes a block NaN, as it is stored."""
    scale = x.format.scale
    nan = np.nan if scale.is_float32 else E8M0_NAN
    if scale.element is not None:
        nan = scale.element.nan_code
    return np.array(nan, scale.storage_dtype)
