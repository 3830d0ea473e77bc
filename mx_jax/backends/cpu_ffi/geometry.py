"""The axes of a handler's operands and results, by a string that names them in the way of einsum.

    "*l m k, *l m k/32, *r n k, *lr -> *lr m n"

`*l` stands for any number of batch axes. Operands with the same letter have the same batch;
different batches may have an axis of length one where others have more, and `*lr` is what both give
together. `m` is an axis. `k/32` has one entry for each block of 32 positions of k, or of fewer at
its end, and `k/k` one for all. A number is an axis of that length. `(m0 m1)` are axes that the
handler takes as one, filled up to whole blocks.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.codecs.blocks import num_blocks
from mx_jax.formats import WHOLE, BlockSize, Whole

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A name or number; with a block size, it counts blocks."""

    name: str
    block: BlockSize | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """One operand or result.

    Attributes:
      batch: letters of its batch.
      groups: its other axes; the handler takes a group as one.
      axes: the same, one by one.
    """

    batch: str
    groups: tuple[tuple[Axis, ...], ...]
    axes: tuple[Axis, ...]


@functools.lru_cache(maxsize=4096)
def parse(axes: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The operands and the results that a string names."""
    operands, results = (side.split(",") for side in axes.split("->"))
    return tuple(map(_parse_array, operands)), tuple(map(_parse_array, results))


def _parse_array(array: str) -> Array:
    batch, groups = "", []
    for letters, group, single in re.findall(r"\*(\w+)|\(([^)]*)\)|([\w/]+)", array):
        batch += letters
        if not letters:
            parts = [axis.partition("/") for axis in ([single] if single else group.split())]
            blocks = (size and (WHOLE if size == name else int(size)) for name, _, size in parts)
            groups.append(
                tuple(
                    Axis(name=name, block=block or None)
                    for (name, _, _), block in zip(parts, blocks, strict=True)
                )
            )
    return Array(batch=batch, groups=tuple(groups), axes=tuple(itertools.chain(*groups)))


class Geometry:
    """The axes of a call's operands and results, with their lengths.

    Attributes:
      operands: arrays as the string names them.
      results: likewise.
      batches: lengths of each batch by its letters.
      sizes: positions of each axis.
      blocks: block size of each axis that has one.
    """

    def __init__(self, axes: str, shapes: Shapes, sizes: Mapping[str, int]):
        self.operands, self.results = parse(axes)
        self.batches: dict[str, Shape] = {}
        self.sizes: dict[str, Any] = dict(sizes)
        self.blocks: dict[str, BlockSize] = {}
        for array, shape in zip(self.operands, shapes, strict=True):
            num_batch = len(shape) - len(array.axes)
            if array.batch:
                self.batches[array.batch] = shape[:num_batch]
            for axis, length in zip(array.axes, shape[num_batch:], strict=True):
                if axis.block is None:
                    self.sizes[axis.name] = length
        for array in (*self.operands, *self.results):
            for axis in array.axes:
                if axis.name.isdigit():
                    self.sizes[axis.name] = int(axis.name)
                if axis.block is not None:
                    self.blocks[axis.name] = axis.block
        for letters in {array.batch for array in self.results}:
            lengths = zip(*(self.batches[letter] for letter in letters), strict=True)
            self.batches[letters] = tuple(next((n for n in m if n != 1), 1) for m in lengths)

    def merge(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Operands as the handler takes them: each group of axes is one."""
        merged = []
        for array, x in zip(self.operands, arrays, strict=True):
            if any(len(group) != 1 for group in array.groups):
                batch = self.batches[array.batch]
                missing = [
                    -self.sizes[axis.name] % block
                    if len(group) > 1 and axis.block is None and isinstance(block, int)
                    else 0
                    for group in array.groups
                    for axis in group
                    for block in [self.blocks.get(axis.name)]
                ]
                if any(missing):
                    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, number) for number in missing])
                rest = iter(x.shape[len(batch) :])
                lengths = [math.prod([next(rest) for _ in group]) for group in array.groups]
                x = x.reshape(*batch, *lengths)
            merged.append(x)
        return merged

    def result_shapes(self) -> list[tuple[Shape, Shape]]:
        """Of each result, as the handler gives it, with groups of axes as one, and as it is."""
        shapes = []
        for array in self.results:
            groups = [
                [
                    self.sizes[axis.name]
                    if axis.block is None
                    else num_blocks(axis.block, self.sizes[axis.name])
                    for axis in group
                ]
                for group in array.groups
            ]
            batch = self.batches[array.batch]
            shapes.append(((*batch, *map(math.prod, groups)), (*batch, *itertools.chain(*groups))))
        return shapes

    def factors(self, array: Array) -> list[tuple[str | None, Axis | None]]:
        """What devices split of each axis, by one name for all that have it; None: they do not.

        A place in any batch is one, except where a single matrix stands for many; it is no `Axis`.
        """
        given, wanted = (
            {axis.name for array in side for axis in array.axes}
            for side in (self.operands, self.results)
        )
        batch, full = self.batches.get(array.batch, ()), self.batches[self.results[0].batch]
        pairs: list[tuple[str | None, Axis | None]] = [
            (f"batch{place}" if own != 1 or wide == 1 else None, None)
            for place, (own, wide) in enumerate(zip(batch, full, strict=False))
        ]
        shared = {name for name in given & wanted if not name.isdigit()}
        return pairs + [(axis.name if axis.name in shared else None, axis) for axis in array.axes]

    def splits(self, axis: Axis | None, num_devices: int) -> bool:
        """Whether an axis falls into so many parts without cutting a block."""
        block = None if axis is None else self.blocks.get(axis.name)
        if axis is None or block is None:
            return True
        size = self.sizes[axis.name]
        if isinstance(block, Whole) or not isinstance(size, int):
            return False
        return size % (block * num_devices) == 0
