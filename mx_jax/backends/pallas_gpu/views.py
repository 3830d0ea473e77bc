"""How the quantizing kernel sees a tensor, and what one program takes of it at a time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Shape = tuple[int, ...]

LANES = 32
WARPS = 4
# What a thread loads at a time, and what a warp reads of a row, where rows are longer.
_VECTOR_BYTES = 16
_LINE_BYTES = 128
# Values that a thread holds of a tile of rows.
_PER_THREAD = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program quantizes of a view, and how its warps, their lanes and registers share it.

    Each size below divides the one before, axis by axis; the view has as many axes.

    Attributes:
      axes: along each of these a tile has one whole block.
      shape: the tile.
      all_warps: what four warps hold in their first registers.
      warp: what a warp holds of that.
      lanes: what its lanes hold in one vector each.
      vector: what one lane loads at a time.
    """

    axes: tuple[int, ...]
    shape: Shape
    all_warps: Shape
    warp: Shape
    lanes: Shape
    vector: Shape

    def padded(self, shape: Shape) -> Shape:
        """The smallest view of whole tiles."""
        return tuple(n + -n % tile for n, tile in zip(shape, self.shape, strict=True))


def _along_rows(num_blocks: int, block: int, itemsize: int) -> Tile:
    """Of a view `[blocks, block]`: whole blocks one after another in memory."""
    vector = _VECTOR_BYTES // itemsize
    rows = LANES * vector // block
    repeats = _PER_THREAD // vector
    while num_blocks % (WARPS * rows * repeats) and repeats > 1:
        repeats //= 2
    return Tile(
        axes=(1,),
        shape=(WARPS * rows * repeats, block),
        all_warps=(WARPS * rows, block),
        warp=(rows, block),
        lanes=(rows, block),
        vector=(1, vector),
    )


def _along_columns(shape: Shape, block: int, itemsize: int) -> Tile:
    """Of a view `[blocks, block, inner]`: lines of 128 bytes under each other.

    Or of `[blocks, block, blocks', block]`, with blocks along rows too: those are the last axis.
    """
    line, inside = _LINE_BYTES // itemsize, shape[3:]
    vector, wide = _VECTOR_BYTES // itemsize, line // math.prod(inside)

    def area(warps: tuple[int, int]) -> int:
        sizes = zip((shape[0], shape[2]), (warps[0], warps[1] * wide), strict=True)
        return math.prod(n + -n % size for n, size in sizes)

    # So many down and across: the way that pads least, the widest of those.
    down, across = min(((1, WARPS), (2, WARPS // 2), (WARPS, 1)), key=area)
    all_warps = (down, block, across * wide, *inside)
    return Tile(
        axes=(1, 3) if inside else (1,),
        shape=all_warps,
        all_warps=all_warps,
        warp=(1, block, wide, *inside),
        lanes=(1, LANES * vector // line, wide, *inside),
        vector=(*(1,) * (len(shape) - 1), vector),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How the kernel sees a tensor: `[outer * length / block, block, ...]`.

    Attributes:
      original: the tensor's shape.
      split: the same as `[outer, length]`, `[outer, length, inner]` for blocks along another axis
        than the last, or `[outer, length, last]` for blocks along both.
      block: elements of a block.
      both: whether there are blocks along the last axis too.
    """

    original: tuple[int, ...]
    split: tuple[int, ...]
    block: int
    both: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], blocks: Sequence[tuple[int, Any]]) -> "View":
        """The view for blocks along these axes, ascending."""
        axis, block = blocks[0]
        axis %= len(shape)
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        both = len(blocks) > 1
        split = (outer, shape[axis], inner) if both or inner > 1 else (outer, shape[axis])
        return cls(original=shape, split=split, block=block, both=both)

    @property
    def whole(self) -> tuple[int, ...]:
        """`split` in whole blocks."""
        blocked = (1, 2) if self.both else (1,)
        return tuple(n + -n % self.block if i in blocked else n for i, n in enumerate(self.split))

    @property
    def shape(self) -> tuple[int, ...]:
        """What the kernel sees, before it is padded to whole tiles."""
        outer, length, *inner = self.whole
        if self.both:
            inner = [inner[0] // self.block, self.block]
        return (outer * (length // self.block), self.block, *inner)

    def tile(self, itemsize: int) -> Tile:
        """What one program quantizes of it."""
        if len(self.shape) == 2:
            return _along_rows(self.shape[0], self.block, itemsize)
        return _along_columns(self.shape, self.block, itemsize)

    def into(self, x: jax.Array) -> jax.Array:
        """The tensor as the view; a copy only where its last blocks are partial."""
        return padded(x.reshape(self.split), self.whole).reshape(self.shape)

    def codes(self, codes: jax.Array) -> jax.Array:
        """The kernel's codes in the tensor's shape."""
        return self._cut(codes, self.shape, self.whole, self.split).reshape(self.original)

    def scales(self, scales: jax.Array, index: int, shape: tuple[int, ...]) -> jax.Array:
        """The kernel's scales along the first or second of the blocked axes, in their own shape."""
        axis = 1 + index
        inside = 2 * axis - 1
        kept = self.shape[:inside] + self.shape[inside + 1 :]
        whole, split = list(self.whole), list(self.split)
        whole[axis] = split[axis] = whole[axis] // self.block
        return self._cut(scales, kept, whole, split).reshape(shape)

    @staticmethod
    def _cut(x: jax.Array, kept: Sequence[int], whole: Sequence[int], split: Any) -> jax.Array:
        """Without what whole tiles added, then without what whole blocks did."""
        return x[tuple(map(slice, kept))].reshape(whole)[tuple(map(slice, split))]


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros behind, up to a shape."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, wide - n) for n, wide in zip(x.shape, shape, strict=True)])
