"""What the kernels have in common: loops, stores, and the body of those whose warps specialize.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.architecture import Tiles
from mx_jax.backends.pallas_gpu.layouts import CHUNK_ROWS, FIELDS, ROWS

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# How often a loop runs: a number, or one that the kernel computes.
Count = int | jax.Array

# Bytes of a row of a tile in shared memory: 64 bfloat16, as wide as an operand in registers.
SWIZZLE = 128
# Bytes that a row in memory is a multiple of, for TMA.
_LINE = 16


def transforms(columns: int, swizzle: int = SWIZZLE) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def loop(count: Count, body: Callable[[jax.Array], None]) -> None:
    """`body(i)` for i from 0, counted in 32 bits whatever JAX's default is."""
    lax.fori_loop(jnp.int32(0), jnp.int32(count), lambda i, _: body(i), None)


def staged_loop(count: Count, stages: int, body: Callable[[jax.Array, jax.Array], None]) -> None:
    """`body(i, stage)` for i from 0, by turns of the stages: found without a division."""

    def step(i: jax.Array, stage: jax.Array) -> jax.Array:
        body(i, stage)
        return jnp.where(stage == stages - 1, 0, stage + 1)

    lax.fori_loop(jnp.int32(0), jnp.int32(count), step, jnp.int32(0))


def share(split: jax.Array, splits: int, steps: int) -> tuple[Any, Any]:
    """The first of a program's steps, and how many it has; static if all have as many."""
    count, rest = divmod(steps, splits)
    if not rest:
        return split * count, count
    begin, end = (lax.div(i * jnp.int32(steps), jnp.int32(splits)) for i in (split, split + 1))
    return begin, end - begin


def copyable(size: int, tile: int, unit: int) -> int:
    """What an axis is padded to for TMA, which fills and clips what a tile has beyond it."""
    to = tile if size > tile else unit
    return size + -size % to


# Kernels of which one warp copies and others multiply ---------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What one program computes."""

    matrix: Any  # which product of the batch, or which group's matrix
    lead: Any  # first index of the left operand
    out: Any  # first index of the result
    row: Any  # the tile's first row in both
    tile: Any  # its number among all tiles of rows
    begin: Any  # first step along k
    steps: Any  # how many
    own: tuple[Any, Any] | None = None  # the tile's own rows, from and up to; None: all of it
    factors: tuple[Any, ...] = ()  # what sums are multiplied by, one after the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A tile of a product, for a grid `(split, n, row)`; or `(split, n, visit)` for rows in groups.

    One warp copies step after step along k into stages of shared memory; others multiply, and wait
    for it at barriers, one pair for a stage. Kinds of programs say what is copied and how operands
    reach the tensor cores: `launch`, `sources` and `multiply`.

    Attributes:
      tiles: sizes.
      out_dtype: of the result.
      batch: products, or groups.
      num_k: steps along k, all splits together.
      in_groups: whether a list of visits says which rows are a program's own.
    """

    tiles: Tiles
    out_dtype: jnp.dtype
    batch: int
    num_k: int
    in_groups: bool

    def launch(self, operands: tuple[jax.Array, ...]) -> dict[str, Any]:
        """Threads of a program and what they share, `out_smem` for its result among it."""
        raise NotImplementedError

    def sources(self, operands: tuple[Any, ...], place: Place, step: jax.Array) -> tuple[Any, ...]:
        """What a step copies of the operands in memory."""
        raise NotImplementedError

    def multiply(self, *operands: Any, **scratch: Any) -> None:
        """Given a place, the sources of a step and `keep(sums, piece of shared memory, columns)`,
        copy and multiply along k, and keep the sums."""
        raise NotImplementedError

    def staged(self, values: jax.Array, piece: Any) -> tuple[Any, Any]:
        """The result's numbers, and a view of shared memory that takes them so."""
        return values, piece

    def run(
        self, name: str, operands: tuple[Any, ...], lists: tuple[Any, ...], n: int, how: Any
    ) -> jax.Array:
        """`[batch, m, n']`, of rows in groups `[1, rows, n']`; n' is n, padded to be copied.

        The left operand, `[batch, m, k]` or `[1, rows, k]`, comes first; `lists` are visits and
        factors `[2 * groups]` of rows in groups.
        """
        tiles, dtype, (lead, rows) = self.tiles, self.out_dtype, operands[0].shape[:2]
        # Swizzled tiles are copied, or of rows in groups any row by itself.
        width = ROWS if self.in_groups else SWIZZLE // dtype.itemsize
        columns = copyable(n, width, _LINE // dtype.itemsize)
        num_m = -(-rows // tiles.m)
        visits = lists[0].shape[0] // FIELDS if self.in_groups else self.batch * num_m

        def body(*gmem: Any, **scratch: Any) -> None:
            sources_gmem, out_gmem = gmem[: len(operands)], gmem[-1]
            place = self._place(num_m, *gmem[len(operands) : -1])

            def keep(sums: jax.Array, piece: Any, columns: Any) -> None:
                for factor in place.factors:
                    sums = sums * factor
                if place.own is None:
                    values, target = self.staged(sums.astype(dtype), piece)
                    target[...] = values
                    plgpu.commit_smem()
                    to = out_gmem.at[place.out, pl.ds(place.row, tiles.m), columns]
                    plgpu.copy_smem_to_gmem(piece, to)
                else:
                    summed = jnp.broadcast_to(place.steps > 0, sums.shape)
                    sums = jnp.where(summed, sums, jnp.zeros_like(sums))
                    values, target = self.staged(sums.astype(dtype), piece)
                    plgpu.store(target, values, optimized=False)
                    plgpu.commit_smem()
                    copy_rows(piece, out_gmem, (place.out, place.row, columns), *place.own)

            sources = functools.partial(self.sources, sources_gmem, place)
            self.multiply(place, lambda step: sources(place.begin + step), keep, **scratch)

        semantics = plgpu.LoweringSemantics.Warpgroup
        out = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((tiles.splits * lead, rows, columns), dtype),
            grid=(tiles.splits, -(-n // tiles.n), visits),
            grid_names=("split", "n", "row"),
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
            kernel_name=name,
            interpret=how,
            **self.launch(operands),
        )(*operands, *lists)
        # Shares of a tile are added in a fixed order.
        return out if tiles.splits == 1 else out.reshape(-1, lead, rows, columns).sum(0)

    def _place(self, num_m: int, visits: Any = None, factors: Any = None) -> Place:
        split, row = lax.axis_index("split"), lax.axis_index("row")
        begin, steps = share(split, self.tiles.splits, self.num_k)
        of_k: dict[str, Any] = {"tile": row, "begin": begin, "steps": steps}
        if not self.in_groups:
            matrix, m = (each(row, jnp.int32(num_m)) for each in (lax.div, lax.rem))
            out, first = split * self.batch + matrix, m * self.tiles.m
            return Place(matrix=matrix, lead=matrix, out=out, row=first, **of_k)
        group, first, begin, end = (visits[row * FIELDS + i] for i in range(FIELDS))
        first, matrix = pl.multiple_of(first, CHUNK_ROWS), jnp.minimum(group, self.batch - 1)
        # Rows of no group take no step, and get zeros.
        of_k["steps"] = jnp.where((group < self.batch) & (begin < end), steps, 0)
        group_factors = (
            () if factors is None else (factors[matrix + i * self.batch] for i in range(2))
        )
        own_rows = begin - first, end - first
        return Place(
            matrix=matrix,
            lead=0,
            out=split,
            row=first,
            own=own_rows,
            factors=tuple(group_factors),
            **of_k,
        )


def copy_steps(
    steps: Count,
    stages: int,
    sources: Callable[[jax.Array], Iterable[Any]],
    targets: Iterable[Any],
    full: Any,
    empty: Any,
) -> None:
    """One warp's work: what `sources` gives of each step, to a stage of the targets.

    Once those who read it are done: they arrive at `empty`, for which the first `stages` steps do
    not wait. Copies arrive at `full`.
    """

    def copy(i: jax.Array, stage: jax.Array) -> None:
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        for gmem, smem in zip(sources(i), targets, strict=True):
            plgpu.copy_gmem_to_smem(gmem, smem.at[stage], full.at[stage])

    staged_loop(steps, stages, copy)


def copy_rows(
    tile: Any, out_gmem: Any, to: tuple[Any, Any, Any], begin: jax.Array, end: jax.Array
) -> None:
    """Begin to copy rows of a tile, from `begin` up to `end`, eight at a time where they can be.

    `to` is index, row of the tile's first, a multiple of eight, and columns in the result.
    """
    lead, first, columns = to
    whole = jnp.minimum(-(-begin // CHUNK_ROWS) * CHUNK_ROWS, end)
    rest = jnp.maximum(end // CHUNK_ROWS * CHUNK_ROWS, whole)
    chunks = lax.div(rest - whole, jnp.int32(CHUNK_ROWS))

    def copy(row: jax.Array, rows: int) -> None:
        at = out_gmem.at[lead, pl.ds(first + row, rows), columns]
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(row, rows)], at)

    loop(whole - begin, lambda i: copy(begin + i, 1))
    loop(chunks, lambda i: copy(whole + i * CHUNK_ROWS, CHUNK_ROWS))
    loop(end - rest, lambda i: copy(rest + i, 1))
