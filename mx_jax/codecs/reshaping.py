"""Reshaping a blocked tensor where every block stays whole."""

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from mx_jax.codecs.blocks import Blocks, scales_shape
from mx_jax.formats import WHOLE, BlockSize, Whole

Shape = tuple[int, ...]
_REMEDY = "dequantize() first, or reshape before quantizing"


class Reshaped(NamedTuple):
    """Shapes of the codes and of the scales, the shape that the tensor scale is broadcast to and
    then gets, and the blocks."""

    codes: Shape
    scales: Shape
    spread: Shape
    tensor_scale: Shape
    blocks: Blocks


def reshape(x: Any, shape: Any, options: dict[str, Any]) -> Any:
    """An MXArray in another shape; see `MXArray.reshape`."""
    if {name for name, value in options.items() if value is not None} != {"order"} or (
        options["order"] != "C"
    ):
        raise ValueError(
            f"MXArray.reshape: takes order='C' alone, got {options}; dequantize() first"
        )
    tensor_scale = x.tensor_scale
    given = None if tensor_scale is None else tensor_scale.shape
    to = reshape_blocks(shape, x.shape, x.blocks, given)
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
    wanted: Any, shape: Shape, blocks: Blocks, tensor_scale: Shape | None
) -> Reshaped:
    """What `x.reshape(wanted)` does to a blocked tensor.

    Elements keep their row-major order. Axes that are joined or divided together form a group; in a
    group, blocks may only lie along the last axis, in whole blocks, before and after.

    Args:
      wanted: the new lengths; one of them may be -1.
      shape: logical shape.
      blocks: axes from the end with block sizes.
      tensor_scale: shape of the tensor scale, or None.

    Raises:
      ValueError: sizes that differ, or blocks that would not stay whole.
      TypeError: lengths that are no integers.
    """
    new = _complete(wanted, shape)
    if new == shape:
        given = tensor_scale or (1,) * len(shape)
        return Reshaped(new, scales_shape(new, blocks), given, given, blocks)
    if 0 in shape:
        raise _cut(new, shape, blocks)
    sizes = {axis % len(shape): size for axis, size in blocks}
    given = (1,) * len(shape) if tensor_scale is None else tensor_scale
    spread, lengths, new_sizes = list(given), [1] * len(new), {}
    for old_axes, new_axes in _groups(shape, new, sizes):
        blocked = [axis for axis in old_axes if axis in sizes]
        if blocked:
            found = _blocks_of_group(old_axes, new_axes, shape, new, sizes)
            if found is None:
                raise _cut(new, shape, blocks)
            new_sizes |= found
        if any(given[axis] != 1 for axis in old_axes):
            if len(old_axes) > 1 and blocked:
                raise _cut(new, shape, blocks)
            for axis in old_axes:
                spread[axis] = shape[axis]
            for axis in new_axes:
                lengths[axis] = new[axis]
    if sizes and all(sizes.get(axis) is WHOLE for axis in range(len(shape))):
        new_sizes = dict.fromkeys(range(len(new)), WHOLE)
    found = tuple((axis - len(new), size) for axis, size in sorted(new_sizes.items()))
    return Reshaped(new, scales_shape(new, found), tuple(spread), tuple(lengths), found)


def _complete(wanted: Any, shape: Shape) -> Shape:
    """The new lengths, -1 worked out."""
    if len(wanted) == 1 and isinstance(wanted[0], Sequence):
        wanted = wanted[0]
    try:
        new = [operator.index(length) for length in wanted]
    except TypeError:
        raise TypeError(f"MXArray.reshape: lengths must be ints, got shape={wanted!r}") from None
    size, known = math.prod(shape), math.prod(length for length in new if length != -1)
    if new.count(-1) == 1 and known and size % known == 0:
        new[new.index(-1)] = size // known
    if any(length < 0 for length in new) or math.prod(new) != size:
        raise ValueError(
            f"MXArray.reshape: needs a shape of size={size}, got shape={tuple(wanted)} for an "
            f"array of shape={shape}"
        )
    return tuple(new)


def _groups(
    shape: Shape, new: Shape, sizes: dict[int, BlockSize]
) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of old and of new axes of one size; axes of one are in none, unless they
    have blocks."""
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
    old_axes: list[int],
    new_axes: list[int],
    shape: Shape,
    new: Shape,
    sizes: dict[int, BlockSize],
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
        f"{_REMEDY}"
    )
