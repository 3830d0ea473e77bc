"""What the kernels have in common: steps that one warp copies ahead, loops, stores.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.tiles import CHUNK_ROWS

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Bytes of a row of a tile in shared memory: 64 bfloat16, as wide as an operand in registers.
SWIZZLE = 128


def transforms(columns: int, swizzle: int = SWIZZLE) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def store(ref: Any, value: Any) -> None:
    """Write an array from where its layout has it, however many bytes of a thread lie together."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        # Before JAX 0.12 an assignment is the same; what it reads first, nobody uses.
        ref[...] = value


def loop(count: Any, body: Callable[[Any], None]) -> None:
    """`body(i)` for i from 0, counted in 32 bits whatever JAX's default is."""
    lax.fori_loop(jnp.int32(0), jnp.int32(count), lambda i, _: body(i), None)


def staged_loop(count: Any, stages: int, body: Callable[[Any, Any], None]) -> None:
    """`body(i, stage)` for i from 0, by turns of the stages: found without a division."""

    def step(i: Any, stage: Any) -> Any:
        body(i, stage)
        return jnp.where(stage == stages - 1, 0, stage + 1)

    lax.fori_loop(jnp.int32(0), jnp.int32(count), step, jnp.int32(0))


def share(split: Any, splits: int, steps: int) -> tuple[Any, Any]:
    """The first of a program's steps, and how many it has: one more than others at most.

    Static if all have as many.
    """
    count, rest = divmod(steps, splits)
    if not rest:
        return split * count, count
    begin, end = (lax.div(i * jnp.int32(steps), jnp.int32(splits)) for i in (split, split + 1))
    return begin, end - begin


def copy_steps(
    steps: Any,
    stages: int,
    copies: Callable[[Any, Any], Iterable[tuple[Any, Any]]],
    full: Any,
    empty: Any,
) -> None:
    """One warp's work: each step to a stage of shared memory, once those who read it are done.

    Args:
      steps: how many.
      stages: the first `stages` steps wait for nobody.
      copies: of a step, to a stage: from where, and to where.
      full: barriers at which the copies of a stage arrive.
      empty: barriers at which its readers arrive.
    """

    def copy(i: Any, stage: Any) -> None:
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
        for gmem, smem in copies(i, stage):
            plgpu.copy_gmem_to_smem(gmem, smem, full.at[stage])

    staged_loop(steps, stages, copy)


def copy_rows(tile: Any, out_gmem: Any, to: tuple[Any, Any], begin: Any, end: Any) -> None:
    """Begin to copy rows from `begin` up to `end` of a tile, eight at a time where they can be.

    Args:
      tile: in shared memory, of which any row can be copied by itself.
      out_gmem: the result.
      to: where the tile's first row lies there, and its columns.
      begin: the first row; the tile's first row is a multiple of eight there.
      end: behind the last.
    """
    first, columns = to
    whole = jnp.minimum(-(-begin // CHUNK_ROWS) * CHUNK_ROWS, end)
    rest = jnp.maximum(end // CHUNK_ROWS * CHUNK_ROWS, whole)
    chunks = lax.div(rest - whole, jnp.int32(CHUNK_ROWS))

    def copy(row: Any, rows: int) -> None:
        from_, at = tile.at[pl.ds(row, rows)], out_gmem.at[pl.ds(first + row, rows), columns]
        plgpu.copy_smem_to_gmem(from_, at)

    loop(whole - begin, lambda i: copy(begin + i, 1))
    loop(chunks, lambda i: copy(whole + i * CHUNK_ROWS, CHUNK_ROWS))
    loop(end - rest, lambda i: copy(rest + i, 1))
