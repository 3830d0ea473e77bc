"""Hopper's kernel for groups of rows: the dense product's, with rows and weights by a schedule.

Device code only; `multiply.py` picks and prepares. A program reads which rows of which group are
its own, and multiplies them by the group's weights as `products/wgmma.py` does. It stores those
rows alone: what else its tile holds is another program's.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.casts.decode import Decoder
from mx_jax.backends.pallas_gpu.grouped.copies import copy_rows
from mx_jax.backends.pallas_gpu.grouped.visits import CHUNK_ROWS, FIELDS
from mx_jax.backends.pallas_gpu.layouts.weights import ROWS
from mx_jax.backends.pallas_gpu.products.wgmma import WgmmaProgram
from mx_jax.backends.pallas_gpu.stores import store as store_registers
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu


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
      visits: as `visits.visits` gives them.
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
        scaled=factors is not None,
    )
    return plgpu.kernel(
        program.body_of_groups,
        out_type=jax.ShapeDtypeStruct((tiles.splits * x.shape[0], columns), out_dtype),
        grid=(tiles.splits, program.num_n, program.num_m),
        grid_names=("split", "n", "visit"),
        num_threads=program.num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_grouped_wgmma_{format.name}",
        interpret=interpret,
    )(*operands)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedProgram(WgmmaProgram):
    """`WgmmaProgram` for a grid `(split, n, visit)`, whose batch are the groups.

    Attributes:
      rows: of the activations, and of each split's result.
      scaled: whether sums are multiplied by factors.
    """

    rows: int
    scaled: bool

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for the result, of which any row is copied by itself."""
        return plgpu.SMEM(shape, self.out_dtype, transforms=(plgpu.TilingTransform((1, ROWS)),))

    def body_of_groups(self, *refs):
        """Read which rows of which group; copy, decode, multiply; then copy those rows."""
        x_gmem, codes_gmem, scales_gmem, visits_gmem, *rest = refs
        factors_gmem, (out_gmem, *scratch) = rest[: self.scaled], rest[self.scaled :]
        slots, barriers, out_smem, *scratch = scratch
        split, n, visit = (lax.axis_index(name) for name in ("split", "n", "visit"))
        group, first, begin, end = (visits_gmem[visit * FIELDS + i] for i in range(FIELDS))
        first = pl.multiple_of(first, CHUNK_ROWS)
        matrix = jnp.minimum(group, self.batch - 1)
        factors = [gmem[matrix + i * self.batch] for gmem in factors_gmem for i in range(2)]

        def segments(run: Any, carry: Any) -> Any:
            splits = jnp.int32(self.tiles.splits)
            step, after = (lax.div(i * self.num_k, splits) for i in (split, split + 1))
            # Rows of no group take no step, and get the zeros that sums begin with.
            steps = jnp.where((group < self.batch) & (begin < end), after - step, 0)
            return run(None, step, steps, carry)

        def at(_: Any, step: Any) -> tuple[Any, ...]:
            x = x_gmem.at[pl.ds(first, self.tiles.m), pl.ds(step * self.tiles.k, self.tiles.k)]
            return x, *self.weights_at(codes_gmem, scales_gmem, matrix, n, step)

        def store(_: Any, sums: Any, row_tile: Any) -> None:
            tile = out_smem.at[row_tile]
            for factor in factors:
                sums = sums * factor
            store_registers(tile.T, self.transposed(sums))
            plgpu.commit_smem()
            columns = pl.ds(n * self.tiles.n + row_tile * ROWS, ROWS)
            to = (split * self.rows + first, columns)
            copy_rows(tile, out_gmem, to, begin - first, end - first)
            plgpu.wait_smem_to_gmem(0)

        self.multiply(segments, at, store, slots, barriers, tuple(scratch))
