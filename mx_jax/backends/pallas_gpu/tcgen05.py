"""Blackwell's kernel: two block-scaled operands, multiplied as they are by tcgen05.

Of one warpgroup, one warp copies tiles of codes and scales into shared memory and another moves the
scales on to tensor memory and starts the products, which tensor memory sums in float32. The other
warpgroup writes the sums out.

Device code; imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.architecture import Tiles
from mx_jax.backends.pallas_gpu.device import (
    SWIZZLE,
    Place,
    Program,
    copy_steps,
    plgpu,
    staged_loop,
    transforms,
)
from mx_jax.backends.pallas_gpu.layouts import SCALE_COLUMNS, SCALE_ROWS

# Codes and scales of both operands.
_COPIES = 4


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    visits: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    block: int,
    n: int,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    interpret: object = None,
) -> jax.Array:
    """The product `[batch, m, n]`, or `[1, rows, n]` of rows in groups, zeros in rows of no group.

    Args:
      lhs: float8 or float4 `[batch, m, k]`; m at most 8 or a multiple of it, k of `tiles.k`. Of
        rows in groups `[1, rows, k]`.
      rhs: likewise `[batch, n, k]`, or `[groups, n, k]`.
      lhs_scales: `[batch * m' / 128, k / (4 * block), 32, 16]` in E8M0 or E4M3, of m' rows: m
        padded to a multiple of 128. Of rows in groups those of each visit's rows.
      rhs_scales: likewise, of n.
      visits: as `layouts.visits` gives them, of rows in groups; without splits.
      factors: float32 `[2 * groups]`: what each group's sums are multiplied by first, and by which
        then; None for none.
      block: codes that share a scale.
      n: rows of the right operand, without what it is padded to.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    batch, _, k = rhs.shape
    program = Tcgen05Program(
        block=block,
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        batch=batch,
        num_k=k // tiles.k,
        in_groups=visits is not None,
        interpreted=interpret is not None,
    )
    grouped = "" if visits is None else "grouped_"
    name = f"mx_jax_{grouped}tcgen05_{lhs.dtype}_{rhs.dtype}_{block}"
    lists = tuple(each for each in (visits, factors) if each is not None)
    return program.run(name, (lhs, rhs, lhs_scales, rhs_scales), lists, n, interpret)[..., :n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05Program(Program):
    """A warpgroup that copies and multiplies, and one that writes the sums."""

    block: int
    interpreted: bool

    @property
    def columns(self) -> int:
        """Columns of the result that are written at once."""
        return SWIZZLE // self.out_dtype.itemsize

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales along one step of k."""
        return self.tiles.k // (self.block * SCALE_COLUMNS)

    def launch(self, operands: tuple[jax.Array, ...]) -> dict[str, Any]:
        """Shared memory, tensor memory, barriers."""
        tiles, stages, dtypes = self.tiles, self.tiles.stages, [x.dtype for x in operands]
        sides = (tiles.m, dtypes[0], dtypes[2]), (tiles.n, dtypes[1], dtypes[3])
        # Pieces of the result are copied as a whole, or any row by itself.
        how = _tiles_of(self.out_dtype)
        how = (plgpu.TilingTransform((1, self.columns)),) if self.in_groups else how
        scratch = {
            "codes": tuple(
                plgpu.SMEM((stages, rows, tiles.k), dtype, transforms=_tiles_of(dtype))
                for rows, dtype, _ in sides
            ),
            "scales": tuple(
                plgpu.SMEM((stages, rows // SCALE_ROWS, self.scale_tiles, 32, 16), dtype)
                for rows, _, dtype in sides
            ),
            "acc": plgpu.TMEM((tiles.m, tiles.n), jnp.float32),
            "tensor_scales": tuple(
                plgpu.TMEM(
                    (rows, tiles.k // self.block), dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT
                )
                for rows, _, dtype in sides
            ),
            "out_smem": plgpu.SMEM((2, tiles.m, self.columns), self.out_dtype, transforms=how),
            "full": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
            "done": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        }
        if self.interpreted:
            scratch["values"] = tuple(
                plgpu.SMEM((stages, rows, tiles.k), jnp.float32) for rows, _, _ in sides
            )
        return {"num_threads": 2, "scratch_types": scratch}

    def sources(self, operands: tuple[Any, ...], place: Place, step: jax.Array) -> tuple[Any, ...]:
        """Codes of both operands of a step, then their scales."""
        lhs, rhs, lhs_scales, rhs_scales = operands
        tiles, n, count = self.tiles, lax.axis_index("n"), self.tiles.n // SCALE_ROWS
        along_k = pl.ds(step * tiles.k, tiles.k)
        scales_along_k = pl.ds(step * self.scale_tiles, self.scale_tiles)
        first = place.matrix * (rhs_scales.shape[0] // self.batch) + n * count
        return (
            lhs.at[place.lead, pl.ds(place.row, tiles.m), along_k],
            rhs.at[place.matrix, pl.ds(n * tiles.n, tiles.n), along_k],
            lhs_scales.at[pl.ds(place.tile, 1), scales_along_k],
            rhs_scales.at[pl.ds(first, count), scales_along_k],
        )

    def multiply(
        self,
        place: Place,
        sources: Any,
        keep: Any,
        *,
        codes: tuple[Any, ...],
        scales: tuple[Any, ...],
        full: Any,
        empty: Any,
        done: Any,
        acc: Any,
        out_smem: Any,
        tensor_scales: tuple[Any, ...],
        values: tuple[Any, ...] | None = None,
    ) -> None:
        """One warp copies, one starts products, a warpgroup writes their sums."""
        tiles, warpgroup = self.tiles, lax.axis_index("warpgroup")

        def multiply(i: jax.Array, stage: jax.Array) -> None:
            plgpu.barrier_wait(full.at[stage])
            lhs, rhs = (ref.at[stage] for ref in codes)
            scaled = {}
            if values is not None:
                lhs, rhs = (
                    scaled_values(ref, scale.at[stage], value.at[stage], self.block)
                    for ref, scale, value in zip((lhs, rhs), scales, values, strict=True)
                )
            else:
                for source, target in zip(scales, tensor_scales, strict=True):
                    plgpu.async_copy_scales_to_tmem(source.at[stage], target)
                scaled = {"a_scale": tensor_scales[0], "b_scale": tensor_scales[1]}
            # The tensor cores free the stage when they have read it.
            plgpu.tcgen05_mma(acc, lhs, rhs.T, empty.at[stage], accumulate=i > 0, **scaled)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    copy_steps(place.steps, tiles.stages, sources, (*codes, *scales), full, empty)

                @pl.when(warp == 1)
                def _():
                    staged_loop(place.steps, tiles.stages, multiply)
                    plgpu.tcgen05_commit_arrive(done)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_wait(done)
            for part in range(tiles.n // self.columns):
                sums = plgpu.async_load_tmem(acc.at[:, pl.ds(part * self.columns, self.columns)])
                at = lax.axis_index("n") * tiles.n + part * self.columns
                keep(sums, out_smem.at[part % 2], pl.ds(at, self.columns))
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            plgpu.wait_load_tmem()
            plgpu.wait_smem_to_gmem(0)


def scaled_values(codes: jax.Array, scales: Any, values: Any, block: int) -> Any:
    """For the interpreter, which lacks block-scaled products: an operand in float32.

    Codes `[rows, k]` of a step times their tiles of scales, written to shared memory `values`.
    """
    tiles, along_k = scales.shape[:2]
    # (tile of rows, tile of columns, row % 32, row / 32, column).
    loaded = scales[...].reshape(tiles, along_k, 32, 4, SCALE_COLUMNS)
    plain = loaded.transpose(0, 3, 2, 1, 4).reshape(tiles * SCALE_ROWS, along_k * SCALE_COLUMNS)
    factors = jnp.repeat(plain.astype(jnp.float32), block, axis=1)
    values[...] = codes[...].astype(jnp.float32) * factors
    plgpu.commit_smem()
    return values


def _tiles_of(dtype: jnp.dtype) -> tuple[Any, ...]:
    return transforms(SWIZZLE * 8 // jnp.finfo(dtype).bits)
