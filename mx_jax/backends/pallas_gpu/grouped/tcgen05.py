"""Blackwell's kernel for groups of rows: the one for many tiles, its rows and weights by a list.

Device code only; `scaled.py` lays out and picks. For each tile the list says which rows of which
group are its own: they are multiplied by the group's weights as `products/tcgen05_persistent.py`
does. Those rows alone are stored: what else the tile holds is another's.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.grouped.copies import copy_rows
from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS, FIELDS
from mx_jax.backends.pallas_gpu.layouts.scaled import SCALE_ROWS
from mx_jax.backends.pallas_gpu.products.tcgen05_persistent import PersistentProgram, Place
from mx_jax.backends.pallas_gpu.stores import store
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu


def grouped_products(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    visits: jax.Array,
    factors: jax.Array | None = None,
    *,
    block: int,
    num_groups: int,
    columns: int,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """The product `[rows, columns]` of rows in groups, zeros in rows of no group.

    Args:
      lhs: float8 or float4 `[rows, k]`; rows a multiple of 8, k of `tiles.k`.
      rhs: likewise `[g * n', k]`; n' a multiple of `tiles.n`.
      lhs_scales: `[visits * tiles.m / 128, k / (4 * block), 32, 16]`, of each visit's rows.
      rhs_scales: `[g * n' / 128, k / (4 * block), 32, 16]`.
      visits: as `visits.visits` gives them.
      factors: float32 `[2 * g]`: what each group's sums are multiplied by first, and by which then;
        None for none.
      block: codes that share a scale.
      num_groups: g.
      columns: of the result, at most n'.
      tiles: what one program computes, two of them if `tiles.ctas` is 2, and how many there are.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile; of single programs only.
    """
    arrays = (lhs, rhs, lhs_scales, rhs_scales)
    program = GroupedProgram(
        block=block,
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        num_m=visits.shape[0] // FIELDS,
        num_n=rhs.shape[0] // num_groups // tiles.n,
        num_k=lhs.shape[1] // tiles.k,
        batch=num_groups,
        scaled=factors is not None,
        interpreted=interpret is not None,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], columns), out_dtype),
        **program.launch(*(array.dtype for array in arrays)),
        kernel_name=f"mx_jax_grouped_tcgen05_{lhs.dtype}_{rhs.dtype}_{block}",
        interpret=interpret,
    )(*arrays, *(() if factors is None else (factors,)), visits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedPlace(Place):
    """`Place` of a visit.

    Attributes:
      begin: the first of its own rows, counted from its first row.
      end: behind the last.
    """

    begin: Any
    end: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProgram(PersistentProgram):
    """`PersistentProgram` whose rows of tiles are visits, and whose batch are the groups."""

    @property
    def num_tiles(self) -> int:
        """Tiles of all visits."""
        return self.num_m * self.num_n

    def place(self, row: Any, n: Any, *at: Any) -> GroupedPlace:
        """The tile of a visit along n, by the list of visits in memory."""
        (visits,) = at
        group, first, begin, end = (visits[row * FIELDS + i] for i in range(FIELDS))
        return GroupedPlace(
            # A multiple of eight, so that who lowers it can tell.
            first=lax.div(first, jnp.int32(CHUNK_ROWS)) * CHUNK_ROWS,
            scales=row * (self.tiles.m // SCALE_ROWS),
            matrix=jnp.minimum(group, self.batch - 1),
            n=n,
            # Rows of no group take no step, and get zeros.
            steps=jnp.where((group < self.batch) & (begin < end), self.num_k, 0),
            begin=begin - first,
            end=end - first,
        )

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for pieces of the result, of which any row is copied by itself."""
        return plgpu.SMEM(
            shape, self.out_dtype, transforms=(plgpu.TilingTransform((1, self.store)),)
        )

    def put(self, values: Any, piece: Any, place: Place) -> None:
        """Sums to shared memory; zeros where nothing was summed."""
        summed = jnp.broadcast_to(place.steps > 0, values.shape)
        values = jnp.where(summed, values, jnp.zeros_like(values))
        store(piece, values.astype(self.out_dtype))

    def write(self, piece: Any, out_gmem: Any, place: Any, columns: Any) -> None:
        """Copy the visit's own rows of a piece of the result from shared memory."""
        skipped = self.half() * self.rows
        begin, end = (jnp.clip(x - skipped, 0, self.rows) for x in (place.begin, place.end))
        copy_rows(piece, out_gmem, (place.first + skipped, columns), begin, end)

        @pl.when(begin >= end)
        def _():
            # Who waits for all copies but the last waits for none of the piece before.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
