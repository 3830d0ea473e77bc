"""Hopper's kernel: activations by weights that are decoded on their way to wgmma.

A program computes a tile of the transposed product `weights[n, k] x activations[m, k]`, because
wgmma takes its left operand from registers: warpgroups load codes and scales from shared memory,
decode them to bfloat16 and multiply, 64 rows of weights each.

Device code; imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.decode import SWIZZLE, Decoder, plgpu, transforms
from mx_jax.backends.pallas_gpu.layouts import CHUNK, CHUNK_ROWS, FIELDS, ROWS, PackedWeights
from mx_jax.backends.pallas_gpu.tiles import Tiles

# How often a loop runs: a number, or one that the kernel computes.
Count = int | jax.Array

# Bytes that a row in memory is a multiple of, for TMA.
_LINE = 16
# Activations, codes and scales.
_COPIES = 3
# The copying warpgroup only issues copies: it gives the others its registers.
COPYING_REGISTERS = 40
_PROCESSOR_REGISTERS, _MOST_REGISTERS = 65536, 256


def launch_registers(warpgroups: int) -> int:
    """Registers that a thread of so many warpgroups starts with: what ptxas gives, in eights."""
    return min(_PROCESSOR_REGISTERS // (128 * warpgroups) // 8 * 8, _MOST_REGISTERS)


def multiplying_registers(warpgroups: int) -> int:
    """What a thread of each multiplying warpgroup asks for, beside one warpgroup that copies."""
    # All together at most what they were launched with: `setmaxnreg` waits until there are as many
    # registers, so for more it would wait for ever.
    all_registers = launch_registers(warpgroups + 1) * (warpgroups + 1)
    return min((all_registers - COPYING_REGISTERS) // warpgroups // 8 * 8, _MOST_REGISTERS)


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    tiles: Tiles,
    out_dtype: np.dtype,
    interpret: Any = None,
    groups: tuple[jax.Array, jax.Array | None] | None = None,
) -> jax.Array:
    """The product `[batch, m, n]`, or `[1, rows, n]` of rows in groups, zeros in rows of no group.

    Args:
      x: bfloat16 `[batch, m, k]`, or `[1, rows, k]`; no axis is empty.
      weights: packed, `[batch, n, k]`; a tensor scale is left out.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32; float32 where programs share tiles.
      interpret: parameters of Mosaic's interpreter, None to compile.
      groups: of rows in groups, visits as `layouts.visits` gives them, and float32 `[2 * groups]`:
        what each group's sums are multiplied by first, and by which then; None for none.
    """
    (_, m, k), codes, scales = x.shape, weights.codes, weights.scales
    rows = copyable(m, CHUNK_ROWS, 1 if groups is None else CHUNK_ROWS)
    x = jnp.pad(x, ((0, 0), (0, rows - m), (0, copyable(k, CHUNK, 8) - k)))
    program = Program(
        decoder=Decoder(format=weights.format, interpreted=interpret is not None),
        tiles=tiles,
        out_dtype=np.dtype(out_dtype),
        batch=codes.shape[0],
        weight_tiles=codes.shape[1],
        num_k=-(-k // tiles.k),
        in_groups=groups is not None,
    )
    operands = (x, codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1, *scales.shape[2:]))
    lists = tuple(each for each in groups or () if each is not None)
    n = weights.shape[1]
    return program.run(operands, lists, n, interpret)[:, :m, :n]


class Place(NamedTuple):
    """What one program computes."""

    matrix: Any  # which product of the batch, or which group's matrix
    lead: Any  # first index of the activations
    out: Any  # first index of the result
    row: Any  # the tile's first row in both
    begin: Any  # first step along k
    steps: Any  # how many
    kept: tuple[Any, Any] | None = None  # rows that are stored, from and up to; None: all of them
    factors: tuple[Any, ...] = ()  # what sums are multiplied by, one after the other


class Scratch(NamedTuple):
    """What the threads of a program share."""

    smem: tuple[Any, ...]  # stages of activations, codes and scales
    full: Any  # barriers of stages that were copied
    empty: Any  # and of those that were read
    out_smem: Any  # the result of each warpgroup
    operand: Any = None  # a stand-in, for the interpreter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A tile of a product, for a grid `(split, n, row)`; or `(split, n, visit)` for rows in groups.

    Warpgroups decode and multiply 64 rows of weights each; a warp of one more copies step after
    step along k into stages of shared memory. They wait at barriers, one pair for a stage.

    Attributes:
      decoder: of the weights.
      tiles: sizes.
      out_dtype: of the result.
      batch: products, or groups.
      weight_tiles: tiles of 64 rows of a matrix of weights.
      num_k: steps along k, all splits together.
      in_groups: whether a list of visits says which rows are a program's own.
    """

    decoder: Decoder
    tiles: Tiles
    out_dtype: np.dtype
    batch: int
    weight_tiles: int
    num_k: int
    in_groups: bool

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 rows of weights, and warpgroups that multiply them."""
        return self.tiles.n // ROWS

    def run(
        self, operands: tuple[Any, ...], lists: tuple[Any, ...], n: int, interpret: Any
    ) -> jax.Array:
        """`[batch, m, n']`, of rows in groups `[1, rows, n']`; n' is n, padded to be copied.

        The activations, `[batch, m, k]` or `[1, rows, k]`, come first; `lists` are visits and
        factors `[2 * groups]` of rows in groups.
        """
        tiles, dtype, (lead, rows) = self.tiles, self.out_dtype, operands[0].shape[:2]
        # Swizzled tiles are copied, or of rows in groups any row by itself.
        width = ROWS if self.in_groups else SWIZZLE // dtype.itemsize
        columns = copyable(n, width, _LINE // dtype.itemsize)
        num_m = -(-rows // tiles.m)
        visits = lists[0].shape[0] // FIELDS if self.in_groups else self.batch * num_m

        def body(*gmem: Any, **scratch: Any) -> None:
            place = self._place(num_m, *gmem[len(operands) : -1])
            sources = functools.partial(self._sources, gmem[: len(operands)], place)
            self._multiply(place, sources, gmem[-1], Scratch(**scratch))

        grouped = "grouped_" if self.in_groups else ""
        out = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((tiles.splits * lead, rows, columns), dtype),
            grid=(tiles.splits, -(-n // tiles.n), visits),
            grid_names=("split", "n", "row"),
            thread_name="warpgroup",
            num_threads=self.row_tiles + 1,
            scratch_types=self._scratch(),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            kernel_name=f"mx_jax_{grouped}wgmma_{self.decoder.format.name}",
            interpret=interpret,
        )(*operands, *lists)
        # Shares of a tile are added in a fixed order.
        return out if tiles.splits == 1 else out.reshape(-1, lead, rows, columns).sum(0)

    def _scratch(self) -> dict[str, Any]:
        """Stages, barriers, the result of each warpgroup, a stand-in's operand."""
        stages, shape = self.tiles.stages, (self.row_tiles, self.tiles.m, ROWS)
        # Whole tiles are copied, or any row by itself.
        how = transforms(SWIZZLE // self.out_dtype.itemsize)
        how = (plgpu.TilingTransform((1, ROWS)),) if self.in_groups else how
        scratch = {
            "smem": tuple(
                plgpu.SMEM((stages, *shape), dtype, transforms=how)
                for shape, dtype, how in self.decoder.blocks(self.tiles)
            ),
            "full": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=self.row_tiles, num_barriers=stages),
            "out_smem": plgpu.SMEM(shape, self.out_dtype, transforms=how),
        }
        if self.decoder.interpreted:
            scratch["operand"] = plgpu.SMEM((self.row_tiles, ROWS, CHUNK), jnp.bfloat16)
        return scratch

    def _place(self, num_m: int, visits: Any = None, factors: Any = None) -> Place:
        split, row = lax.axis_index("split"), lax.axis_index("row")
        begin, steps = share(split, self.tiles.splits, self.num_k)
        if not self.in_groups:
            matrix, m = (each(row, jnp.int32(num_m)) for each in (lax.div, lax.rem))
            out = split * self.batch + matrix
            return Place(matrix, matrix, out, m * self.tiles.m, begin, steps)
        group, first, start, end = (visits[row * FIELDS + i] for i in range(FIELDS))
        first, matrix = pl.multiple_of(first, CHUNK_ROWS), jnp.minimum(group, self.batch - 1)
        # Rows of no group take no step, and get zeros.
        steps = jnp.where((group < self.batch) & (start < end), steps, 0)
        of_group = [] if factors is None else [factors[matrix + i * self.batch] for i in range(2)]
        kept = start - first, end - first
        return Place(matrix, 0, split, first, begin, steps, kept, tuple(of_group))

    def _sources(self, operands: tuple[Any, ...], place: Place, step: jax.Array) -> tuple[Any, ...]:
        """Activations, codes and scales of one of the program's steps."""
        (x, *weights), step = operands, place.begin + step
        rows, along_k = pl.ds(place.row, self.tiles.m), pl.ds(step * self.tiles.k, self.tiles.k)
        n = lax.axis_index("n")
        first = place.matrix * self.weight_tiles + n * self.row_tiles
        parts = [x.at[place.lead, rows, along_k]]
        for ref, (shape, _, _) in zip(weights, self.decoder.blocks(self.tiles)[1:], strict=True):
            count, pieces = shape[:2]
            parts.append(ref.at[pl.ds(first, count), pl.ds(step * pieces, pieces)])
        return tuple(parts)

    def _multiply(
        self,
        place: Place,
        sources: Any,
        out_gmem: Any,
        scratch: "Scratch",
    ) -> None:
        """A warp of the last warpgroup copies, each of the others sums up its rows of weights."""
        warpgroup, stages = lax.axis_index("warpgroup"), self.tiles.stages
        smem, full, empty, operand = scratch.smem, scratch.full, scratch.empty, scratch.operand

        def step(acc: Any, stage: jax.Array) -> None:
            index = lax.axis_index("warpgroup")
            plgpu.barrier_wait(full.at[stage])
            x, codes, scales = smem
            weights = codes.at[stage], scales.at[stage], index
            for left, columns in self.decoder.step(*weights, self.tiles.k):
                if operand is not None:
                    # For the interpreter, which lacks wgmma with a left operand in registers.
                    operand[index] = left
                    plgpu.commit_smem()
                    left = operand.at[index]
                plgpu.wgmma(acc, left, x.at[stage, :, columns].T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[stage])

        @pl.when(warpgroup == self.row_tiles)
        def _():
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    copy_steps(place.steps, stages, sources, smem, full, empty)

        @pl.when(warpgroup < self.row_tiles)
        def _():
            plgpu.set_max_registers(multiplying_registers(self.row_tiles), action="increase")

            def sum_up(acc: Any) -> Any:
                staged_loop(place.steps, stages, lambda _, stage: step(acc, stage))
                return acc[...]

            sums = pl.run_scoped(sum_up, plgpu.ACC((ROWS, self.tiles.m), jnp.float32))
            columns = lax.axis_index("n") * self.tiles.n + warpgroup * ROWS
            self._store(place, sums, scratch.out_smem.at[warpgroup], out_gmem, pl.ds(columns, ROWS))
            plgpu.wait_smem_to_gmem(0)

    def _store(self, place: Place, sums: jax.Array, piece: Any, to: Any, columns: Any) -> None:
        """Begin to write sums, by a piece of shared memory that takes them transposed once more."""
        for factor in place.factors:
            sums = sums * factor
        if place.kept is not None:
            summed = jnp.broadcast_to(place.steps > 0, sums.shape)
            sums = jnp.where(summed, sums, jnp.zeros_like(sums))
        values = plgpu.layout_cast(sums.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        if place.kept is None:
            piece.T[...] = values
            plgpu.commit_smem()
            rows = pl.ds(place.row, self.tiles.m)
            plgpu.copy_smem_to_gmem(piece, to.at[place.out, rows, columns])
        else:
            plgpu.store(piece.T, values, optimized=False)
            plgpu.commit_smem()
            copy_rows(piece, to, (place.out, place.row, columns), *place.kept)


# Loops and copies --------------------------------------------------------------------------------


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
