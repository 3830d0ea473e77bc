"""Where an operand of a product holds its batch, kept and contracted axes."""

import dataclasses
import functools
import math
from typing import Literal

import jax
from jax import lax

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat, BlockSize, Whole

Shape = tuple[int, ...]
Side = Literal["lhs", "rhs"]
# The three products of a call, as tags and the names of programs have them.
Pass = Literal["output", "grad_input", "grad_weight"]

SIDES: tuple[Side, Side] = ("lhs", "rhs")
# The product that gives which operand's cotangent.
GRADIENT: dict[Side, Pass] = {"lhs": "grad_input", "rhs": "grad_weight"}


@dataclasses.dataclass(frozen=True)
class Axes:
    """The three groups of an operand's axes, counted from the front.

    Operations bring operands into canonical order: `[*batch, *kept, *contracting]`, or
    `[*batch, *contracting, *kept]`, as BLAS takes a matrix that is passed as transposed.

    Attributes:
      batch: axes that the product holds once for both operands.
      kept: axes that the product has from this operand.
      contracting: axes that are summed over; blocks lie along the last.
    """

    batch: tuple[int, ...]
    kept: tuple[int, ...]
    contracting: tuple[int, ...]

    @classmethod
    def ordered(
        cls, *, batch: int = 0, kept: int = 1, contracting: int = 1, k_first: bool = False
    ) -> "Axes":
        """The canonical order of so many axes of each group."""
        axes = tuple(range(batch + kept + contracting))
        middle = batch + (contracting if k_first else kept)
        groups = axes[batch:middle], axes[middle:]
        return cls(axes[:batch], *(groups[::-1] if k_first else groups))

    @functools.cached_property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.batch) + len(self.kept) + len(self.contracting)

    @functools.cached_property
    def k_first(self) -> bool:
        """Whether the contracted axes come before the kept ones."""
        return bool(self.kept) and self.contracting[0] < self.kept[0]

    @functools.cached_property
    def has_canonical_order(self) -> bool:
        """Whether the groups follow each other as operations leave them."""
        return self.order == tuple(range(self.ndim))

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The axes, group by group: the transposition to canonical order."""
        groups = (self.contracting, self.kept) if self.k_first else (self.kept, self.contracting)
        return (*self.batch, *groups[0], *groups[1])

    @functools.cached_property
    def block_axis(self) -> int:
        """The last contracted axis, counted from the end."""
        return self.contracting[-1] - self.ndim

    def exchanged(self) -> "Axes":
        """The same array in a product that contracts what this one keeps."""
        return Axes(self.batch, self.contracting, self.kept)

    def in_batch(self) -> "Axes":
        """The axes of one such array after the other, along a new batch axis in front."""
        batch, kept, contracting = (
            tuple(axis + 1 for axis in group) for group in (self.batch, self.kept, self.contracting)
        )
        return Axes((0, *batch), kept, contracting)

    def blocks(self, format: BlockFormat) -> Blocks:
        """Blocks of an operand in canonical order.

        Along the last contracted axis, and for two-dimensional formats along the last kept axis
        too. WHOLE takes every axis of its group; a tensor that is whole in both has one scale.
        """
        kept_size, size = format.block
        blocks = self._along(size, self.contracting) + self._along(kept_size, self.kept)
        if isinstance(kept_size, Whole):
            blocks += self._along(kept_size, self.batch)
        return tuple(sorted(blocks))

    def _along(self, size: BlockSize, group: tuple[int, ...]) -> Blocks:
        if isinstance(size, int):
            group = () if size == 1 else group[-1:]
        return tuple((axis - self.ndim, size) for axis in group)

    def sizes(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """Sizes of the three groups of an array of that shape."""
        batch, kept, contracting = (
            tuple(shape[axis] for axis in group)
            for group in (self.batch, self.kept, self.contracting)
        )
        return batch, kept, contracting

    def merge_groups(self, x: jax.Array) -> jax.Array:
        """An array in canonical order as `[*batch, kept, k]`, or `[*batch, k, kept]`.

        For backends only: merging two axes that are sharded would cost an all-gather.
        """
        batch, kept, contracting = self.sizes(x.shape)
        sizes = math.prod(kept), math.prod(contracting)
        return x.reshape(*batch, *(sizes[::-1] if self.k_first else sizes))


@dataclasses.dataclass(frozen=True)
class ProductAxes:
    """The axes of both operands of a product `[*batch, *kept of lhs, *kept of rhs]`."""

    lhs: Axes
    rhs: Axes

    @functools.cached_property
    def dimension_numbers(self) -> lax.DotDimensionNumbers:
        """What `jax.lax.dot_general` takes."""
        return (self.lhs.contracting, self.rhs.contracting), (self.lhs.batch, self.rhs.batch)

    def gradient_axes(self, side: Side) -> tuple["ProductAxes", bool]:
        """Axes of the product that gives an operand's gradient in the operand's own order.

        With g `[*batch, *m, *n]`: for lhs, g by rhs over n where lhs holds m first, and rhs by g
        where it holds k first; for rhs, g by lhs over m where rhs holds n first, and lhs by g where
        it holds k first. The second value is whether g is the left operand.
        """
        batch, m, n = len(self.lhs.batch), len(self.lhs.kept), len(self.rhs.kept)
        axes, other = (self.lhs, self.rhs) if side == "lhs" else (self.rhs, self.lhs)
        g = Axes.ordered(batch=batch, kept=m, contracting=n)
        g, other = g if side == "lhs" else g.exchanged(), other.exchanged()
        return (ProductAxes(other, g), False) if axes.k_first else (ProductAxes(g, other), True)

    def block_layouts(self, *formats: BlockFormat | None) -> list[tuple[int, Blocks]]:
        """For each operand its last contracted axis, counted from the end, and its blocks."""
        pairs = zip((self.lhs, self.rhs), formats, strict=True)
        return [(axes.block_axis, axes.blocks(form) if form else ()) for axes, form in pairs]
