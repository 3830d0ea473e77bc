"""Loops, shares, copies and stores of the kernels.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts import CHUNK_ROWS

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# How often a loop runs: a number, or one that the kernel computes.
Count = int | jax.Array

# Bytes of a row of a tile in shared memory: 64 bfloat16, as wide as an operand in registers.
SWIZZLE = 128
# Bytes that a row in memory is a multiple of, for TMA.
LINE = 16


def transforms(columns: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `SWIZZLE` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)


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


# One warp copies, others multiply -----------------------------------------------------------------


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
