"""Blackwell's kernel: two block-scaled operands, multiplied as they are by tcgen05.

Device code only; `products.py` and `grouped.py` lay out and pick. Of one warpgroup, one warp copies
tiles of codes and scales into shared memory and another moves the scales on to tensor memory and
starts the products, which tensor memory sums in float32; each waits for the other at barriers, one
pair for a stage. The other warpgroup writes the sums out.

Imports Mosaic GPU, so the adapters import this file only when they take a call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.device import (
    SWIZZLE,
    copy_rows,
    copy_steps,
    plgpu,
    share,
    staged_loop,
    store,
    transforms,
)
from mx_jax.backends.pallas_gpu.layouts import SCALE_COLUMNS, SCALE_ROWS
from mx_jax.backends.pallas_gpu.tiles import CHUNK_ROWS, FIELDS, Tiles

# Codes and scales of both operands.
_COPIES = 4


def multiply(
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
      rhs: likewise `[batch * n, k]`; n a multiple of `tiles.n`, k of `tiles.k`.
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
        interpreted=interpret is not None,
    )
    arrays = (lhs, rhs, lhs_scales, rhs_scales)
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * rows, columns), out_dtype),
        grid=(tiles.splits, program.num_n, rows // used),
        grid_names=("split", "n", "row"),
        kernel_name=f"mx_jax_tcgen05_{lhs.dtype}_{rhs.dtype}_{block}",
        interpret=interpret,
        **program.launch(*(array.dtype for array in arrays)),
    )(*arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tcgen05Program:
    """What both warpgroups of a program run, for a grid `(split, n, row)`.

    Attributes:
      block: codes that share a scale.
      tiles: sizes.
      used: rows of a tile of the left operand that are read, and written of the product.
      out_dtype: of the result.
      num_m: tiles along m of one product.
      num_n: tiles along n.
      num_k: steps along k, all splits together.
      interpreted: whether stand-ins replace what the interpreter lacks.
    """

    block: int
    tiles: Tiles
    used: int
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    interpreted: bool

    @property
    def columns(self) -> int:
        """Columns of the result that are written at once."""
        return SWIZZLE // self.out_dtype.itemsize

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales along one step of k."""
        return self.tiles.k // (self.block * SCALE_COLUMNS)

    def launch(self, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> dict[str, Any]:
        """Threads of a program, and what they share: shared memory, tensor memory, barriers."""
        tiles, stages = self.tiles, self.tiles.stages
        sides = (tiles.m, lhs, lhs_scale), (tiles.n, rhs, rhs_scale)
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
            "out_smem": self.result((2, tiles.m, self.columns)),
            "full": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
            "done": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        }
        if self.interpreted:
            scratch["values"] = tuple(
                plgpu.SMEM((stages, rows, tiles.k), jnp.float32) for rows, _, _ in sides
            )
        semantics = plgpu.LoweringSemantics.Warpgroup
        return {
            "num_threads": 2,
            "thread_name": "warpgroup",
            "compiler_params": plgpu.CompilerParams(lowering_semantics=semantics),
            "scratch_types": scratch,
        }

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for pieces of the result, each copied as a whole."""
        return plgpu.SMEM(shape, self.out_dtype, transforms=_tiles_of(self.out_dtype))

    def body(self, lhs, rhs, lhs_scales, rhs_scales, out_gmem, **scratch):
        """Copy, multiply; then write the sums."""
        split, row, n = (lax.axis_index(name) for name in ("split", "row", "n"))
        first, steps = share(split, self.tiles.splits, self.num_k)
        column = lax.div(row, jnp.int32(self.num_m)) * self.num_n + n
        num_rows = out_gmem.shape[0] // self.tiles.splits // self.used
        rows = pl.ds((split * num_rows + row) * self.used, self.used)

        def keep(sums: Any, piece: Any, columns: Any) -> None:
            piece[...] = sums.astype(self.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(piece.at[pl.ds(0, self.used)], out_gmem.at[rows, columns])

        gmem = (lhs, rhs, lhs_scales, rhs_scales)
        self.multiply(gmem, row * self.used, row, column, first, steps, keep, **scratch)

    def multiply(
        self,
        gmem: tuple[Any, ...],
        row: Any,
        scales_row: Any,
        column: Any,
        first: Any,
        steps: Any,
        keep: Callable[[Any, Any, Any], None],
        *,
        codes: Any,
        scales: Any,
        full: Any,
        empty: Any,
        done: Any,
        acc: Any,
        out_smem: Any,
        **memory: Any,
    ) -> None:
        """Copy and multiply along k; then store the sums.

        Args:
          gmem: both operands' codes, then both operands' scales.
          row: the first of the tile, of the left operand.
          scales_row: which tile of scales of the left operand it is.
          column: tile of the right operand.
          first: step along k.
          steps: how many.
          keep: given some columns of the sums, shared memory for them, and which columns they are.
          codes: stages of both operands' codes.
          scales: likewise of their scales.
          full: barriers of filled stages.
          empty: barriers of stages that were read.
          done: barrier of the sums.
          acc: the sums.
          out_smem: two pieces of the result.
          **memory: tensor memory for scales, or what stands in for it.
        """
        tiles, warpgroup = self.tiles, lax.axis_index("warpgroup")

        def copies(i: Any, stage: Any) -> Any:
            along_k = pl.ds((first + i) * tiles.k, tiles.k)
            scales_along_k = pl.ds((first + i) * self.scale_tiles, self.scale_tiles)
            sides = (
                (row, scales_row, tiles.m, self.used),
                (column * tiles.n, column, tiles.n, tiles.n),
            )
            for side, (start, tile, size, used) in enumerate(sides):
                read = codes[side].at[stage, pl.ds(0, used)]
                yield gmem[side].at[pl.ds(start, used), along_k], read
                count = size // SCALE_ROWS
                from_ = gmem[side + 2].at[pl.ds(tile * count, count), scales_along_k]
                yield from_, scales[side].at[stage]

        def multiply(i: Any, stage: Any) -> None:
            plgpu.barrier_wait(full.at[stage])
            self._step(acc, i > 0, stage, codes, scales, empty, **memory)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    copy_steps(steps, tiles.stages, copies, full, empty)

                @pl.when(warp == 1)
                def _():
                    staged_loop(steps, tiles.stages, multiply)
                    plgpu.tcgen05_commit_arrive(done)

        @pl.when(warpgroup == 1)
        def _():
            plgpu.barrier_wait(done)
            for part in range(tiles.n // self.columns):
                columns = pl.ds(part * self.columns, self.columns)
                sums = plgpu.async_load_tmem(acc.at[:, columns])
                at = lax.axis_index("n") * tiles.n + part * self.columns
                keep(sums, out_smem.at[part % 2], pl.ds(at, self.columns))
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            plgpu.wait_load_tmem()
            plgpu.wait_smem_to_gmem(0)

    def _step(
        self, acc, accumulate, stage, codes, scales, empty, *, tensor_scales, values=None
    ) -> None:
        """Start a step's products; the tensor cores free its stage when they have read it."""
        lhs, rhs = (ref.at[stage] for ref in codes)
        if values is not None:
            lhs, rhs = (
                scaled_values(ref, scale.at[stage], value.at[stage], self.block)
                for ref, scale, value in zip((lhs, rhs), scales, values, strict=True)
            )
            scaled = {}
        else:
            for source, target in zip(scales, tensor_scales, strict=True):
                plgpu.async_copy_scales_to_tmem(source.at[stage], target)
            scaled = {"a_scale": tensor_scales[0], "b_scale": tensor_scales[1]}
        plgpu.tcgen05_mma(acc, lhs, rhs.T, empty.at[stage], accumulate=accumulate, **scaled)


# Rows in groups -----------------------------------------------------------------------------------


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
      visits: as `tiles.visits` gives them.
      factors: float32 `[2 * g]`: what each group's sums are multiplied by first, and by which then;
        None for none.
      block: codes that share a scale.
      num_groups: g.
      columns: of the result, at most n'.
      tiles: what one program computes; no splits.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    arrays = (lhs, rhs, lhs_scales, rhs_scales)
    program = GroupedProgram(
        block=block,
        tiles=tiles,
        used=tiles.m,
        out_dtype=jnp.dtype(out_dtype),
        num_m=visits.shape[0] // FIELDS,
        num_n=rhs.shape[0] // num_groups // tiles.n,
        num_k=lhs.shape[1] // tiles.k,
        num_groups=num_groups,
        interpreted=interpret is not None,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((lhs.shape[0], columns), out_dtype),
        grid=(program.num_n, program.num_m),
        grid_names=("n", "visit"),
        kernel_name=f"mx_jax_grouped_tcgen05_{lhs.dtype}_{rhs.dtype}_{block}",
        interpret=interpret,
        **program.launch(*(array.dtype for array in arrays)),
    )(*arrays, visits, *(() if factors is None else (factors,)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProgram(Tcgen05Program):
    """`Tcgen05Program` for a grid `(n, visit)`.

    A program reads which rows of which group are its own, and stores those rows alone: what else
    its tile holds is another program's.

    Attributes:
      num_groups: of rows, each with a matrix of its own.
    """

    num_groups: int

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for pieces of the result, of which any row is copied by itself."""
        how = (plgpu.TilingTransform((1, self.columns)),)
        return plgpu.SMEM(shape, self.out_dtype, transforms=how)

    def body(self, lhs, rhs, lhs_scales, rhs_scales, visits, *rest, **scratch):
        """Read which rows of which group; copy, multiply; then write those rows."""
        *factors_gmem, out_gmem = rest
        n, visit = lax.axis_index("n"), lax.axis_index("visit")
        group, first, begin, end = (visits[visit * FIELDS + i] for i in range(FIELDS))
        first = pl.multiple_of(first, CHUNK_ROWS)
        matrix = jnp.minimum(group, self.num_groups - 1)
        factors = [gmem[matrix + i * self.num_groups] for gmem in factors_gmem for i in range(2)]
        # Rows of no group take no step, and get zeros.
        steps = jnp.where((group < self.num_groups) & (begin < end), self.num_k, 0)

        def keep(sums: Any, piece: Any, columns: Any) -> None:
            for factor in factors:
                sums = sums * factor
            summed = jnp.broadcast_to(steps > 0, sums.shape)
            store(piece, jnp.where(summed, sums, jnp.zeros_like(sums)).astype(self.out_dtype))
            plgpu.commit_smem()
            copy_rows(piece, out_gmem, (first, columns), begin - first, end - first)

        gmem = (lhs, rhs, lhs_scales, rhs_scales)
        column = matrix * self.num_n + n
        self.multiply(gmem, first, visit, column, 0, steps, keep, **scratch)


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


def _tiles_of(dtype: Any) -> tuple[Any, ...]:
    return transforms(SWIZZLE * 8 // jnp.finfo(dtype).bits)
