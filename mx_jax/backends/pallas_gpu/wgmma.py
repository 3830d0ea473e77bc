"""Hopper's kernels: by weights that are decoded on their way to wgmma, and sums over groups' rows.

Device code only; `products.py` and `grouped.py` pick. A program computes a tile of the transposed
product `weights[n, k] x activations[m, k]`, because wgmma takes its left operand from registers:
one warp copies into shared memory, step after step along k; warpgroups load codes and scales from
there, decode them to bfloat16 and multiply, 64 rows of weights each.

Imports Mosaic GPU, so the adapters import this file only when they take a call.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.decode import Decoder, DecodingProgram
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
from mx_jax.backends.pallas_gpu.layouts import CHUNK, ROWS
from mx_jax.backends.pallas_gpu.tiles import (
    CHUNK_ROWS,
    COPYING_REGISTERS,
    FIELDS,
    Tiles,
    multiplying_registers,
)
from mx_jax.formats import BlockFormat

# Bytes that a row in memory is a multiple of.
_LINE = 16
# Activations, codes and scales.
_COPIES = 3
# Rows of a step of wgmma, the least that a group has more than another where rows are summed.
UNIT = 16


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    n: int,
    format: BlockFormat,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """The product `[batch, m, n]`, of weights without their tensor scale.

    Args:
      x: bfloat16 `[batch, m, k]`; none of them is empty.
      codes: int32 `[batch, n' / 64, k' / group, 64, 16]`, as `PackedWeights` has them.
      scales: int32 `[batch, n' / 64, k' / (2 * granularity), 64]`.
      n: rows of weights, at most n'.
      format: of the weights; a tensor scale is left out.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32; float32 where programs share tiles.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    batch, m, k = x.shape
    rows = _copyable(m, 8, 1)
    x = jnp.pad(x, ((0, 0), (0, rows - m), (0, _copyable(k, CHUNK, _LINE // 2) - k)))
    decoder = Decoder(format=format, interpreted=interpret is not None)
    program = WgmmaProgram.of(x, codes, n, decoder=decoder, tiles=tiles, out_dtype=out_dtype)
    itemsize = program.out_dtype.itemsize
    columns = _copyable(n, SWIZZLE // itemsize, _LINE // itemsize)
    out = plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * batch, rows, columns), out_dtype),
        grid=(tiles.splits, program.num_n, batch * program.num_m),
        grid_names=("split", "n", "row"),
        kernel_name=f"mx_jax_wgmma_{format.name}",
        interpret=interpret,
        **program.launch(),
    )(x, codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1, *scales.shape[2:]))
    out = out.reshape(tiles.splits, batch, rows, columns)[:, :, :m, :n]
    return out[0] if tiles.splits == 1 else out.sum(0)


def _copyable(size: int, tile: int, line: int) -> int:
    """What an axis is padded to for TMA, which fills and clips what a tile has beyond it."""
    to = tile if size > tile else line
    return size + -size % to


class WgmmaProgram(DecodingProgram):
    """One warp copies, warpgroups decode and multiply: for a grid `(split, n, row)`."""

    def launch(self) -> dict[str, Any]:
        """Threads of a program, and what they share: stages, barriers, a stand-in's operand."""
        stages = self.tiles.stages
        scratch = {
            "smem": tuple(
                plgpu.SMEM((stages, *shape), dtype, transforms=how)
                for shape, dtype, how in self.blocks
            ),
            "full": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=self.row_tiles, num_barriers=stages),
            "out_smem": self.result((self.row_tiles, self.tiles.m, ROWS)),
        }
        if self.decoder.interpreted:
            scratch["operand"] = plgpu.SMEM((self.row_tiles, ROWS, CHUNK), jnp.bfloat16)
        semantics = plgpu.LoweringSemantics.Warpgroup
        return {
            "num_threads": self.row_tiles + 1,
            "thread_name": "warpgroup",
            "compiler_params": plgpu.CompilerParams(lowering_semantics=semantics),
            "scratch_types": scratch,
        }

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for the result, of which whole tiles are copied."""
        how = transforms(SWIZZLE // self.out_dtype.itemsize)
        return plgpu.SMEM(shape, self.out_dtype, transforms=how)

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem, *, out_smem, **scratch):
        """Copy, decode, multiply; then one copy of each tile of the result."""
        sizes = self.tiles
        split, n, row = (lax.axis_index(name) for name in ("split", "n", "row"))
        matrix, m = (each(row, jnp.int32(self.num_m)) for each in (lax.div, lax.rem))
        rows = pl.ds(m * sizes.m, sizes.m)
        first, steps = share(split, sizes.splits, self.num_k)

        def at(i: Any) -> tuple[Any, ...]:
            x = x_gmem.at[matrix, rows, pl.ds((first + i) * sizes.k, sizes.k)]
            return x, *self.weights_at(codes_gmem, scales_gmem, matrix, n, first + i)

        def keep(sums: Any, row_tile: Any) -> None:
            out_smem.at[row_tile].T[...] = self.transposed(sums)
            plgpu.commit_smem()
            columns = pl.ds(n * sizes.n + row_tile * ROWS, ROWS)
            to = out_gmem.at[split * self.batch + matrix, rows, columns]
            plgpu.copy_smem_to_gmem(out_smem.at[row_tile], to)
            plgpu.wait_smem_to_gmem(0)

        self.multiply(steps, at, keep, **scratch)

    def multiply(
        self,
        steps: Any,
        at: Callable[[Any], tuple[Any, ...]],
        keep: Callable[[Any, Any], None],
        *,
        smem: tuple[Any, ...],
        full: Any,
        empty: Any,
        operand: Any = None,
    ) -> None:
        """Copy, decode and multiply along k; then store the sums.

        Args:
          steps: along k.
          at: of a step, activations, codes and scales in memory.
          keep: given transposed sums `[64, m]`, and which 64 of the tile's rows they are.
          smem: stages of the same three.
          full: barriers of filled stages.
          empty: barriers of stages that were read.
          operand: a stand-in's.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == self.row_tiles)
        def _():
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    def copies(i: Any, stage: Any) -> Any:
                        return zip(at(i), (ref.at[stage] for ref in smem), strict=True)

                    copy_steps(steps, self.tiles.stages, copies, full, empty)

        @pl.when(warpgroup < self.row_tiles)
        def _():
            plgpu.set_max_registers(multiplying_registers(self.row_tiles), action="increase")

            def sum_up(acc: Any) -> Any:
                step = functools.partial(self._step, acc, smem, full, empty, operand)
                staged_loop(steps, self.tiles.stages, lambda _, stage: step(stage))
                return acc[...]

            accumulator = plgpu.ACC((ROWS, self.tiles.m), jnp.float32)
            keep(pl.run_scoped(sum_up, accumulator), warpgroup)

    def _step(
        self, acc: Any, smem: Any, full: Any, empty: Any, operand_smem: Any, stage: Any
    ) -> None:
        """A multiplying warpgroup's part of a step."""
        warpgroup = lax.axis_index("warpgroup")
        plgpu.barrier_wait(full.at[stage])
        x_smem, *weights = smem
        codes, scales = (ref.at[stage] for ref in weights)
        for operand, columns in self.operands(codes, scales, warpgroup, plgpu.Layout.WGMMA):
            if operand_smem is not None:
                # For the interpreter, which lacks wgmma with a left operand in registers.
                operand_smem[warpgroup] = operand
                plgpu.commit_smem()
                operand = operand_smem.at[warpgroup]
            plgpu.wgmma(acc, operand, x_smem.at[stage, :, columns].T)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[stage])

    def transposed(self, sums: Any) -> Any:
        """The result's numbers, so that shared memory takes them transposed once more."""
        return plgpu.layout_cast(sums.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)


# Rows in groups -----------------------------------------------------------------------------------


def grouped_products(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    visits: jax.Array,
    factors: jax.Array | None = None,
    *,
    num_groups: int,
    columns: int,
    format: BlockFormat,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Partial products of rows in groups; summed over `tiles.splits` they are the product.

    Args:
      x: bfloat16 `[rows, k]`; rows a multiple of 8, k of 64. What lies beyond counts as zeros.
      codes: int32 `[g * n' / 64, k' / group, 64, 16]`, as `PackedWeights` has them; n' at least
        `columns`.
      scales: int32 `[g * n' / 64, k' / (2 * granularity), 64]`.
      visits: as `tiles.visits` gives them.
      factors: float32 `[2 * g]`: what each group's sums are multiplied by first, and by which then;
        None for none.
      num_groups: g.
      columns: of the result, at most n'.
      format: of the weights; a tensor scale is left out.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[splits * rows, columns]`.
    """
    operands = (x, codes, scales, visits, *(() if factors is None else (factors,)))
    program = GroupedProgram(
        decoder=Decoder(format=format, interpreted=interpret is not None),
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        batch=num_groups,
        num_m=visits.shape[0] // FIELDS,
        num_n=-(-columns // tiles.n),
        num_k=-(-x.shape[1] // tiles.k),
        weight_tiles=codes.shape[0] // num_groups,
        rows=x.shape[0],
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * x.shape[0], columns), out_dtype),
        grid=(tiles.splits, program.num_n, program.num_m),
        grid_names=("split", "n", "visit"),
        kernel_name=f"mx_jax_grouped_wgmma_{format.name}",
        interpret=interpret,
        **program.launch(),
    )(*operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProgram(WgmmaProgram):
    """`WgmmaProgram` for a grid `(split, n, visit)`, whose batch are the groups.

    A program reads which rows of which group are its own, and stores those rows alone: what else
    its tile holds is another program's.

    Attributes:
      rows: of the activations, and of each split's result.
    """

    rows: int

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for the result, of which any row is copied by itself."""
        return plgpu.SMEM(shape, self.out_dtype, transforms=(plgpu.TilingTransform((1, ROWS)),))

    def body(self, x_gmem, codes_gmem, scales_gmem, visits_gmem, *rest, out_smem, **scratch):
        """Read which rows of which group; copy, decode, multiply; then copy those rows."""
        *factors_gmem, out_gmem = rest
        sizes = self.tiles
        split, n, visit = (lax.axis_index(name) for name in ("split", "n", "visit"))
        group, first, begin, end = (visits_gmem[visit * FIELDS + i] for i in range(FIELDS))
        first = pl.multiple_of(first, CHUNK_ROWS)
        matrix = jnp.minimum(group, self.batch - 1)
        factors = [gmem[matrix + i * self.batch] for gmem in factors_gmem for i in range(2)]
        begin_k, steps = share(split, sizes.splits, self.num_k)

        def at(i: Any) -> tuple[Any, ...]:
            x = x_gmem.at[pl.ds(first, sizes.m), pl.ds((begin_k + i) * sizes.k, sizes.k)]
            return x, *self.weights_at(codes_gmem, scales_gmem, matrix, n, begin_k + i)

        def keep(sums: Any, row_tile: Any) -> None:
            tile = out_smem.at[row_tile]
            for factor in factors:
                sums = sums * factor
            store(tile.T, self.transposed(sums))
            plgpu.commit_smem()
            columns = pl.ds(n * sizes.n + row_tile * ROWS, ROWS)
            copy_rows(
                tile, out_gmem, (split * self.rows + first, columns), begin - first, end - first
            )
            plgpu.wait_smem_to_gmem(0)

        # Rows of no group take no step, and get the zeros that sums begin with.
        steps = jnp.where((group < self.batch) & (begin < end), steps, 0)
        self.multiply(steps, at, keep, **scratch)


# Sums over the rows of each group -----------------------------------------------------------------


def group_sums(
    lhs: jax.Array,
    rhs: jax.Array,
    rows: jax.Array,
    factors: jax.Array,
    *,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """`lhs[rows of j]^T rhs[rows of j]` of each group j: the gradient of groups' matrices.

    A program computes a tile of one group's sum: one warpgroup copies rows of both operands into
    shared memory some steps ahead and multiplies them from there. Groups begin and end at multiples
    of 16 rows, as blocks along the rows do, and so do its steps: 64 rows at a time, then 16. So no
    row of another group is ever read.

    Args:
      lhs: bfloat16 `[p, m]`; p a multiple of 8, m of 64.
      rhs: bfloat16 `[p, n]`; n a multiple of 64.
      rows: int32 `[2 * g]`: where groups begin, and how many rows they have, multiples of `UNIT`.
      factors: float32 `[2]`, of the sums, one after the other.
      tiles: m and n of a tile, k rows a step, steps in flight.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[g, m, n]`.
    """
    groups = rows.shape[0] // 2
    program = SumsProgram(tiles=tiles, out_dtype=jnp.dtype(out_dtype), num_groups=groups)
    (_, m), (_, n) = lhs.shape, rhs.shape
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((groups, m, n), out_dtype),
        grid=(groups, -(-n // tiles.n), -(-m // tiles.m)),
        grid_names=("group", "n", "m"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="mx_jax_group_sums",
        interpret=interpret,
    )(lhs, rhs, rows, factors)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumsProgram:
    """What each program of a grid `(group, n, m)` runs.

    Attributes:
      tiles: sizes.
      out_dtype: of the result.
      num_groups: how many.
    """

    tiles: Tiles
    out_dtype: Any
    num_groups: int

    def body(self, lhs_gmem, rhs_gmem, rows_gmem, factors_gmem, out_gmem):
        """Steps of many rows, steps of few; then one copy of the sums' tile."""
        tiles, group = self.tiles, lax.axis_index("group")
        begin = pl.multiple_of(rows_gmem[group], UNIT)
        size = rows_gmem[self.num_groups + group]
        whole = lax.div(size, jnp.int32(tiles.k))
        rest = lax.div(size - whole * tiles.k, jnp.int32(UNIT))
        operands = lhs_gmem, rhs_gmem

        def multiply(acc):
            self._steps(acc, operands, begin, whole, tiles.k, tiles.stages)
            after = pl.multiple_of(begin + whole * tiles.k, UNIT)
            self._steps(acc, operands, after, rest, UNIT, 2)
            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((tiles.m, tiles.n), jnp.float32))
        self._store(sums * factors_gmem[0] * factors_gmem[1], out_gmem)

    def _steps(
        self, acc: Any, operands: tuple[Any, ...], begin: Any, steps: Any, rows: int, stages: int
    ) -> None:
        """Add the products of so many steps of so many rows."""
        tiles = self.tiles
        # Mosaic takes as many rows for one product as numbers are swizzled together.
        swizzle = min(SWIZZLE, 2 * rows)
        how = transforms(swizzle // 2, swizzle)

        def spec(columns: int, axis: str) -> Any:
            at = lax.axis_index(axis)
            block = rows, columns
            return plgpu.BlockSpec(block, lambda i: (i, at), transforms=how, delay_release=1)

        def step(_, lhs_smem, rhs_smem):
            plgpu.wgmma(acc, lhs_smem.T, rhs_smem)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[spec(tiles.m, "m"), spec(tiles.n, "n")],
            max_concurrent_steps=stages,
        )(*(gmem.at[pl.ds(begin, gmem.shape[0])] for gmem in operands))
        # What comes next writes where the last steps' operands lie.
        plgpu.wgmma_wait(0)

    def _store(self, sums: Any, out_gmem: Any) -> None:
        tiles, how = self.tiles, transforms(SWIZZLE // self.out_dtype.itemsize)
        tile = plgpu.SMEM((tiles.m, tiles.n), self.out_dtype, transforms=how)

        @functools.partial(pl.run_scoped, out_smem=tile)
        def _(out_smem):
            out_smem[...] = sums.astype(self.out_dtype)
            plgpu.commit_smem()
            rows = pl.ds(lax.axis_index("m") * tiles.m, tiles.m)
            columns = pl.ds(lax.axis_index("n") * tiles.n, tiles.n)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[lax.axis_index("group"), rows, columns])
            plgpu.wait_smem_to_gmem(0)
