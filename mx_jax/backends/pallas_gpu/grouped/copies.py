"""Some rows of a tile to memory: those of one group.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS
from mx_jax.backends.pallas_gpu.products.ring import loop

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu


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

    loop(whole - begin, lambda i, _: copy(begin + i, 1), None)
    loop(chunks, lambda i, _: copy(whole + i * CHUNK_ROWS, CHUNK_ROWS), None)
    loop(end - rest, lambda i, _: copy(rest + i, 1), None)
