"""Blackwell's kernel for many tiles: programs that stay, and store one tile beneath the next.

Device code only; `scaled.py` lays out and picks. As many programs as processors, each one tile
after another. A warp copies codes and scales ahead, across the ends of tiles; another moves scales
on to tensor memory and starts the products there, in one of two places for sums; the second
warpgroup stores the sums of the tile before meanwhile. Two programs may compute a tile together
(cta_group::2): each holds half of the rows of both operands, and half of the sums.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts.scaled import SCALE_ROWS
from mx_jax.backends.pallas_gpu.products.persistent_memory import PersistentMemory
from mx_jax.backends.pallas_gpu.products.ring import loop
from mx_jax.backends.pallas_gpu.products.tcgen05 import COPIES, scaled_values
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Programs of one wave have so many tiles of rows by the same tiles of columns: a wave's operands
# then lie in the level-2 cache.
_SNAKE = 8


def products(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    factors: jax.Array | None = None,
    *,
    block: int,
    batch: int,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """The product `[batch * m, n]` of padded operands.

    Args:
      lhs: float8 or float4 `[batch * m, k]`; m a multiple of `tiles.m`.
      rhs: likewise `[batch * n, k]`; n a multiple of `tiles.n`, k of `tiles.k`.
      lhs_scales: `[batch * m / 128, k / (4 * block), 32, 16]` in E8M0 or E4M3.
      rhs_scales: likewise, of n.
      factors: float32 `[2 * batch]`: what each product's sums are multiplied by first, and by which
        then; None for none.
      block: codes that share a scale.
      batch: number of independent products.
      tiles: what one program computes, two of them if `tiles.ctas` is 2, and how many there are.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile; of single programs only.
    """
    (rows, k), columns = lhs.shape, rhs.shape[0] // batch
    arrays = (lhs, rhs, lhs_scales, rhs_scales)
    program = PersistentProgram(
        block=block,
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        num_m=rows // batch // tiles.m,
        num_n=columns // tiles.n,
        num_k=k // tiles.k,
        batch=batch,
        scaled=factors is not None,
        interpreted=interpret is not None,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((rows, columns), out_dtype),
        **program.launch(*(array.dtype for array in arrays)),
        kernel_name=f"mx_jax_tcgen05_persistent_{lhs.dtype}_{rhs.dtype}_{block}",
        interpret=interpret,
    )(*arrays, *(() if factors is None else (factors,)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tile lies.

    Attributes:
      first: its first row of the left operand and of the result.
      scales: its first tile of the left operand's scales.
      matrix: of the right operand.
      n: tile along n.
      steps: along k; none, and the sums are anything.
    """

    first: Any
    scales: Any
    matrix: Any
    n: Any
    steps: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentProgram(PersistentMemory):
    """What both warpgroups of each program run."""

    def body(self, *refs, **scratch):
        """Copy; multiply; store the sums of the tile before."""
        warpgroup, program = (lax.axis_index(name) for name in ("warpgroup", "program"))
        operands, (*extra, out_gmem) = refs[:COPIES], refs[COPIES:]
        factors, at = extra[: self.scaled], extra[self.scaled :]
        programs = min(self.tiles.programs, self.num_tiles)
        count = lax.div(self.num_tiles - 1 - program, jnp.int32(programs)) + 1

        def place(i: Any) -> Place:
            index = program + i * programs
            grid = self.num_tiles // self.num_n, self.num_n
            return self.place(*plgpu.planar_snake(index, grid, 0, _SNAKE), *at)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    self._copy_tiles(count, place, operands, **scratch)

                @pl.when((warp == 1) & (self.half() == 0))
                def _():
                    self._multiply_tiles(count, place, **scratch)

        @pl.when(warpgroup == 1)
        def _():
            self._store_tiles(count, place, factors, out_gmem, **scratch)

    def place(self, row: Any, n: Any, *at: Any) -> Place:
        """The tile in a row of tiles of the whole batch, and along n.

        Args:
          row: of tiles.
          n: tile along n.
          *at: memory that says more of a row; none here.
        """
        matrix = lax.div(row, jnp.int32(self.num_m))
        first, scales = row * self.tiles.m, row * (self.tiles.m // SCALE_ROWS)
        return Place(first=first, scales=scales, matrix=matrix, n=n, steps=self.num_k)

    @property
    def _together(self) -> dict[str, Any]:
        """How two programs of a tile multiply: the first starts it for both."""
        return {"collective_axis": "cta"} if self.tiles.ctas == 2 else {}

    def half(self) -> Any:
        """Which of the two programs of a tile this is."""
        return lax.axis_index("cta") if self.tiles.ctas == 2 else jnp.int32(0)

    def put(self, values: Any, piece: Any, place: Place) -> None:
        """Some columns of a tile's sums to shared memory."""
        piece[...] = values.astype(self.out_dtype)

    def write(self, piece: Any, out_gmem: Any, place: Place, columns: Any) -> None:
        """Copy a piece of the result, all rows of this program's tile, from shared memory."""
        rows = pl.ds(place.first + self.half() * self.rows, self.rows)
        plgpu.copy_smem_to_gmem(piece, out_gmem.at[rows, columns])

    def _copy_tiles(self, count, place, gmem, *, codes, scales, full, empty, **_):
        """Every step of every tile to shared memory, once its stage is free."""

        def copy_tile(i: Any, carry: Any) -> Any:
            at = place(i)

            def copy_step(step: Any, carry: Any) -> Any:
                filled, slot = carry
                copy = self._copies(gmem, (codes, scales), full, at, step)
                return filled + 1, self.ring.fill(filled, slot, empty, copy)

            return loop(at.steps, copy_step, carry)

        loop(count, copy_tile, (jnp.int32(0), jnp.int32(0)))

    def _copies(self, gmem, smem, full, place, step) -> Callable[[Any], None]:
        """What copies a step of a tile of both operands to a stage; of a pair's, each its part."""
        tiles, column = self.tiles, place.matrix * self.num_n + place.n
        along_k = pl.ds(step * tiles.k, tiles.k)
        scales_along_k = pl.ds(step * self.scale_tiles, self.scale_tiles)
        partitioned, whole = {}, {}
        if tiles.ctas == 2:
            by_leader = {"collective_axes": "cta"}
            partitioned = by_leader | {"leader_tracked": plgpu.CopyPartition.PARTITIONED(0)}
            whole = by_leader | {"leader_tracked": plgpu.CopyPartition.REPLICATED}
        right_scales = column * (tiles.n // SCALE_ROWS)
        sides = (
            (place.first, place.scales, tiles.m, partitioned),
            (column * tiles.n, right_scales, tiles.n, whole),
        )

        def copy(slot: Any) -> None:
            for side, (first, first_scales, size, scales_how) in enumerate(sides):
                codes, scales = (refs[side].at[slot] for refs in smem)
                from_codes = gmem[side].at[pl.ds(first, size), along_k]
                scale_rows = pl.ds(first_scales, size // SCALE_ROWS)
                from_scales = gmem[side + 2].at[scale_rows, scales_along_k]
                plgpu.copy_gmem_to_smem(from_codes, codes, full.at[slot], **partitioned)
                plgpu.copy_gmem_to_smem(from_scales, scales, full.at[slot], **scales_how)

        return copy

    def _multiply_tiles(self, count, place, *, sums, done, drained, **scratch):
        """Every step of every tile, once its place for sums is free."""

        def multiply_tile(i: Any, slot: Any) -> Any:
            at = lax.rem(i, jnp.int32(2))

            @pl.when(i >= self.behind)
            def _():
                plgpu.barrier_wait(drained.at[lax.rem(i - self.behind, jnp.int32(2))])

            acc = sums.at[:, pl.ds(at * (self.tiles.n - self.overlap), self.tiles.n)]

            def multiply_step(step: Any, slot: Any) -> Any:
                self._multiply(acc, step > 0, slot, **scratch)
                return self.ring.after(slot)

            slot = loop(place(i).steps, multiply_step, slot)
            plgpu.tcgen05_commit_arrive(done.at[at], **self._together)
            return slot

        loop(count, multiply_tile, jnp.int32(0))

    def _multiply(
        self, acc, accumulate, slot, *, codes, scales, tensor_scales, full, empty, **rest
    ):
        """Start a step's products; the tensor cores free its stage when they have read it."""
        plgpu.barrier_wait(full.at[slot])
        lhs, rhs = (ref.at[slot] for ref in codes)
        how = self._together | {"accumulate": accumulate}
        if self.interpreted:
            lhs, rhs = (
                scaled_values(ref, scale.at[slot], values.at[slot], self.block)
                for ref, scale, values in zip((lhs, rhs), scales, rest["values"], strict=True)
            )
        else:
            for source, target in zip(scales, tensor_scales, strict=True):
                plgpu.async_copy_scales_to_tmem(source.at[slot], target, **self._together)
            how |= {"a_scale": tensor_scales[0], "b_scale": tensor_scales[1]}
        plgpu.tcgen05_mma(acc, lhs, rhs.T, empty.at[slot], **how)

    def _store_tiles(self, count, place, factors, out_gmem, *, sums, out_smem, done, drained, **_):
        """Every tile's sums, some columns at a time, through shared memory."""
        tiles, parts = self.tiles, self.tiles.n // self.store
        last = (self.overlap or tiles.n) // self.store - 1

        def store_tile(i: Any, _: Any) -> None:
            own, at = place(i), lax.rem(i, jnp.int32(2))
            scales = [gmem[own.matrix + j * self.batch] for gmem in factors for j in range(2)]
            plgpu.barrier_wait(done.at[at])
            for part in range(parts):
                # Columns that the next tile's sums share: the first ones' last, the others' first.
                index = jnp.where(at == 0, parts - 1 - part, part) if self.overlap else part
                column = at * (tiles.n - self.overlap) + index * self.store
                values = plgpu.async_load_tmem(sums.at[:, pl.ds(column, self.store)])
                for scale in scales:
                    values = values * scale
                self.put(values, out_smem.at[part % 2], own)
                plgpu.commit_smem()
                columns = pl.ds(own.n * tiles.n + index * self.store, self.store)
                self.write(out_smem.at[part % 2], out_gmem, own, columns)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                if part == last:
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(drained.at[at])

        loop(count, store_tile, None)
        plgpu.wait_smem_to_gmem(0)
