"""Hopper's kernel for sums over the rows of each group: the gradient of groups' matrices.

Device code only; `multiply.py` picks and prepares. A program computes a tile of one group's sum:
one warpgroup copies rows of both operands into shared memory some steps ahead and multiplies them
from there by wgmma. Groups begin and end at multiples of 16 rows, as blocks along the rows do, and
so do its steps: 64 rows at a time, then 16. So no row of another group is ever read.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.products.program import transforms
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Rows of a step of wgmma, the least that a group has more than another.
UNIT = 16
_SWIZZLE = 128


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
    """`lhs[rows of j]^T rhs[rows of j]` of each group j.

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
        swizzle = min(_SWIZZLE, 2 * rows)
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
        tiles, line = self.tiles, _SWIZZLE // self.out_dtype.itemsize
        tile = plgpu.SMEM((tiles.m, tiles.n), self.out_dtype, transforms=transforms(line, _SWIZZLE))

        @functools.partial(pl.run_scoped, out_smem=tile)
        def _(out_smem):
            out_smem[...] = sums.astype(self.out_dtype)
            plgpu.commit_smem()
            rows = pl.ds(lax.axis_index("m") * tiles.m, tiles.m)
            columns = pl.ds(lax.axis_index("n") * tiles.n, tiles.n)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[lax.axis_index("group"), rows, columns])
            plgpu.wait_smem_to_gmem(0)
