"""How the quantizing kernel sees a tensor, and how what it gives becomes an `MXArray` again."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends.pallas_gpu.casts import tiles
from mx_jax.backends.pallas_gpu.casts.tiles import Tile
from mx_jax.backends.pallas_gpu.layouts.scaled import SCALE_COLUMNS, SCALE_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """How the kernel sees a tensor: `[outer * length / block, block, ...]`.

    Attributes:
      original: the tensor's shape.
      split: the same as `[outer, length]`, `[outer, length, inner]` for blocks along another axis
        than the last, or `[outer, length, last]` for blocks along both.
      block: elements of a block.
      both: whether blocks lie along the last axis too.
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
        if self.both:
            return tiles.along_both(self.shape, self.block, itemsize)
        if len(self.shape) == 2:
            return tiles.along_rows(self.shape[0], self.block, itemsize)
        return tiles.along_columns(self.shape, self.block, itemsize)

    def into(self, x: jax.Array) -> jax.Array:
        """The tensor as the view; a copy only where its last blocks are partial."""
        return padded(x.reshape(self.split), self.whole).reshape(self.shape)

    def codes(self, codes: jax.Array) -> jax.Array:
        """The kernel's codes in the tensor's shape."""
        codes = cut(codes, self.shape).reshape(self.whole)
        return cut(codes, self.split).reshape(self.original)

    def scales(self, scales: jax.Array, index: int, shape: tuple[int, ...]) -> jax.Array:
        """The kernel's scales along the first or second of the blocked axes, in their own shape."""
        axis = 1 + index
        inside = 2 * axis - 1
        kept = self.shape[:inside] + self.shape[inside + 1 :]
        whole, split = list(self.whole), list(self.split)
        whole[axis] = split[axis] = whole[axis] // self.block
        return cut(cut(scales, kept).reshape(whole), tuple(split)).reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViewOfTiles(View):
    """Rows as Blackwell cuts them: `[rows / 128, 4, 32, k / (4 * block), 4, block]`.

    The kernel's scales are then what `ScaledOperand.of` makes of an `MXArray`: it undoes the
    transposition here, and XLA leaves both out.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """What the kernel sees."""
        rows, k = self.split
        return (rows // SCALE_ROWS, 4, 32, k // (SCALE_COLUMNS * self.block), 4, self.block)

    def tile(self, itemsize: int) -> Tile:
        """What one program quantizes of it."""
        return tiles.along_rows_of_tiles(self.block, itemsize)

    def scales(self, scales: jax.Array, index: int, shape: tuple[int, ...]) -> jax.Array:
        """The kernel's scales in their own shape."""
        return scales.transpose(0, 3, 2, 1, 4).reshape(shape)


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x with zeros behind, up to a shape."""
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, wide - n) for n, wide in zip(x.shape, shape, strict=True)])


def cut(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """x without what padding added."""
    return x if x.shape == shape else x[tuple(slice(n) for n in shape)]
