"""Blackwell's kernel: two block-scaled operands, multiplied as they are by tcgen05.

Device code only; `scaled.py` lays out and picks. Of one warpgroup, one warp copies tiles of
codes and scales into shared memory and another moves the scales on to tensor memory and starts the
products, which tensor memory sums in float32; each waits for the other at barriers, one pair for a
stage. The other warpgroup writes the sums out.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts.scaled import SCALE_COLUMNS, SCALE_ROWS
from mx_jax.backends.pallas_gpu.products.ring import loop
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Bytes of a row of a swizzled tile.
SWIZZLE = 128
# Codes and scales of both operands.
COPIES = 4


def partial_products(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scales: jax.Array,
    rhs_scales: jax.Array,
    *,
    block: int,
    batch: int,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Partial products of padded operands; summed over `tiles.splits` they are the product.

    Args:
      lhs: float8 or float4 `[batch * m, k]`; m a multiple of `tiles.m`, or fewer rows, a multiple
        of 8: a tile's other rows are then neither read nor written.
      rhs: likewise `[batch * n, k]`; n a multiple of `tiles.n`, k of `tiles.k * tiles.splits`.
      lhs_scales: `[batch * m' / 128, k / (4 * block), 32, 16]` in E8M0 or E4M3, of m' rows: m
        padded to a multiple of 128.
      rhs_scales: likewise, of n.
      block: codes that share a scale.
      batch: number of independent products.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[splits * batch * m, n]`.
    """
    (rows, k), columns = lhs.shape, rhs.shape[0] // batch
    used = min(tiles.m, rows // batch)
    program = Tcgen05Program(
        block=block,
        tiles=tiles,
        used=used,
        out_dtype=jnp.dtype(out_dtype),
        num_m=rows // batch // used,
        num_n=columns // tiles.n,
        num_k=k // tiles.k,
        num_rows=rows // used,
        interpreted=interpret is not None,
    )
    arrays = (lhs, rhs, lhs_scales, rhs_scales)
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * rows, columns), out_dtype),
        grid=(tiles.splits, program.num_n, program.num_rows),
        grid_names=("split", "n", "row"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(*(array.dtype for array in arrays)),
        kernel_name=f"mx_jax_tcgen05_{lhs.dtype}_{rhs.dtype}_{block}",
        interpret=interpret,
    )(*arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05Program:
    """What both warpgroups of the grid run.

    Attributes:
      block: codes that share a scale.
      tiles: sizes.
      used: rows of a tile of the left operand that are read, and written of the product.
      out_dtype: of the result.
      num_m: tiles along m of one product of the batch.
      num_n: tiles along n.
      num_k: steps along k, all splits together.
      num_rows: tiles along m of the whole batch.
      interpreted: whether stand-ins replace what the interpreter lacks.
    """

    block: int
    tiles: Tiles
    used: int
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    num_rows: int
    interpreted: bool

    @property
    def store(self) -> int:
        """Columns of the result that are written at once."""
        return SWIZZLE // self.out_dtype.itemsize

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales along one step of k."""
        return self.tiles.k // (self.block * SCALE_COLUMNS)

    def scratch_types(self, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> dict[str, Any]:
        """Shared memory, tensor memory and barriers."""
        tiles, stages = self.tiles, self.tiles.stages

        def codes(rows, dtype):
            shape = (stages, rows, tiles.k)
            return plgpu.SMEM(shape, dtype, transforms=transforms(dtype))

        def scales(rows, dtype):
            shape = (stages, rows // SCALE_ROWS, self.scale_tiles, 32, 16)
            return plgpu.SMEM(shape, dtype)

        def tensor_scales(rows, dtype):
            shape, layout = (rows, tiles.k // self.block), plgpu.TMEMLayout.SCALES_LAYOUT
            return plgpu.TMEM(shape, dtype, layout=layout)

        scratch = {
            "codes": (codes(tiles.m, lhs), codes(tiles.n, rhs)),
            "scales": (scales(tiles.m, lhs_scale), scales(tiles.n, rhs_scale)),
            "acc": plgpu.TMEM((tiles.m, tiles.n), jnp.float32),
            "tensor_scales": (
                tensor_scales(tiles.m, lhs_scale),
                tensor_scales(tiles.n, rhs_scale),
            ),
            "out_smem": plgpu.SMEM(
                (2, tiles.m, self.store), self.out_dtype, transforms=transforms(self.out_dtype)
            ),
            "full": plgpu.Barrier(num_arrivals=COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
            "done": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        }
        if self.interpreted:
            scratch["values"] = tuple(
                plgpu.SMEM((stages, rows, tiles.k), jnp.float32) for rows in (tiles.m, tiles.n)
            )
        return scratch

    def body(self, lhs, rhs, lhs_scales, rhs_scales, out_gmem, **scratch):
        """Copy, multiply; then write the sums."""
        warpgroup = lax.axis_index("warpgroup")
        steps = self.num_k // self.tiles.splits

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    gmem = (lhs, rhs, lhs_scales, rhs_scales)
                    loop(steps, lambda i, _: self._copy(i, gmem, **scratch), None)

                @pl.when(warp == 1)
                def _():
                    loop(steps, lambda i, _: self._multiply(i, steps, **scratch), None)

        @pl.when(warpgroup == 1)
        def _():
            self._store(out_gmem, **scratch)

    def _copy(self, i, gmem, *, codes, scales, full, empty, **_):
        """Step i of both operands to shared memory, once its stage is free."""
        tiles, slot = self.tiles, lax.rem(i, jnp.int32(self.tiles.stages))

        @pl.when(i >= tiles.stages)
        def _():
            plgpu.barrier_wait(empty.at[slot])

        row = lax.axis_index("row")
        column = lax.div(row, jnp.int32(self.num_m)) * self.num_n + lax.axis_index("n")
        step = lax.axis_index("split") * (self.num_k // tiles.splits) + i
        along_k = pl.ds(step * tiles.k, tiles.k)
        scales_along_k = pl.ds(step * self.scale_tiles, self.scale_tiles)
        sides = ((row, tiles.m, self.used), (column, tiles.n, tiles.n))
        for side, (index, size, used) in enumerate(sides):
            rows, scale_rows = pl.ds(index * used, used), size // SCALE_ROWS
            plgpu.copy_gmem_to_smem(
                gmem[side].at[rows, along_k], codes[side].at[slot, pl.ds(0, used)], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                gmem[side + 2].at[pl.ds(index * scale_rows, scale_rows), scales_along_k],
                scales[side].at[slot],
                full.at[slot],
            )

    def _multiply(self, i, steps, *, codes, scales, acc, tensor_scales, full, empty, done, **rest):
        """Step i of the product; the tensor cores free its stage when they have read it."""
        slot = lax.rem(i, jnp.int32(self.tiles.stages))
        plgpu.barrier_wait(full.at[slot])
        lhs, rhs = (ref.at[slot] for ref in codes)
        if self.interpreted:
            lhs, rhs = (
                scaled_values(ref, scale.at[slot], values.at[slot], self.block)
                for ref, scale, values in zip((lhs, rhs), scales, rest["values"], strict=True)
            )
            scaled = {}
        else:
            for source, target in zip(scales, tensor_scales, strict=True):
                plgpu.async_copy_scales_to_tmem(source.at[slot], target)
            scaled = {"a_scale": tensor_scales[0], "b_scale": tensor_scales[1]}
        plgpu.tcgen05_mma(acc, lhs, rhs.T, empty.at[slot], accumulate=i > 0, **scaled)

        @pl.when(i == steps - 1)
        def _():
            plgpu.tcgen05_commit_arrive(done)

    def _store(self, out_gmem, *, acc, out_smem, done, **_):
        """The sums, some columns at a time, through shared memory."""
        tiles = self.tiles
        plgpu.barrier_wait(done)
        first = lax.axis_index("split") * self.num_rows + lax.axis_index("row")
        rows = pl.ds(first * self.used, self.used)
        for part in range(tiles.n // self.store):
            sums = plgpu.async_load_tmem(acc.at[:, pl.ds(part * self.store, self.store)])
            out_smem[part % 2] = sums.astype(self.out_dtype)
            plgpu.commit_smem()
            columns = pl.ds(lax.axis_index("n") * tiles.n + part * self.store, self.store)
            written = out_smem.at[part % 2, pl.ds(0, self.used)]
            plgpu.copy_smem_to_gmem(written, out_gmem.at[rows, columns])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        plgpu.wait_load_tmem()
        plgpu.wait_smem_to_gmem(0)


def scaled_values(codes: Any, scales: Any, values: Any, block: int) -> Any:
    """For the interpreter, which lacks block-scaled products: an operand in float32.

    Args:
      codes: of a step, `[rows, k]`.
      scales: its tiles, `[rows / 128, k / (4 * block), 32, 16]`.
      values: shared memory `[rows, k]` that they are written to, and that is given back.
      block: codes that share a scale.
    """
    tiles, along_k = scales.shape[:2]
    # (tile of rows, tile of columns, row % 32, row / 32, column).
    loaded = scales[...].reshape(tiles, along_k, 32, 4, SCALE_COLUMNS)
    plain = loaded.transpose(0, 3, 2, 1, 4).reshape(tiles * SCALE_ROWS, along_k * SCALE_COLUMNS)
    factors = jnp.repeat(plain.astype(jnp.float32), block, axis=1)
    values[...] = codes[...].astype(jnp.float32) * factors
    plgpu.commit_smem()
    return values


def transforms(dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows, 128 bytes wide, without bank conflicts."""
    columns = SWIZZLE * 8 // _bits(dtype)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)


def _bits(dtype: Any) -> int:
    return jnp.finfo(dtype).bits
