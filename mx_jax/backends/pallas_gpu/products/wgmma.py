"""Hopper's kernel: bfloat16 activations by block-scaled weights, decoded on their way to wgmma.

Device code only; `decoded.py` pads and picks. A program computes the transposed product
`weights[n, k] x activations[m, k]`, because wgmma takes its left operand from registers: one
warpgroup copies tiles into shared memory, the others load codes and scales from there, decode them
to bfloat16 and multiply. Each waits for the other at barriers, one pair for a stage.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, ROWS
from mx_jax.backends.pallas_gpu.products.program import DecodingProgram, transforms
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# The memory warpgroup only issues copies: it gives the others its registers.
_MEMORY_REGISTERS = 40


def partial_products(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    format: BlockFormat,
    batch: int,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Partial products of padded operands; summed over `tiles.splits` they are the product.

    Args:
      x: bfloat16 `[batch * m, k]`; m a multiple of `tiles.m`.
      codes: int32 `[batch * n / 64, k / group, 64, 16]`, as `PackedWeights` has them; n a multiple
        of `tiles.n`, k of `tiles.k * tiles.splits`.
      scales: int32 `[batch * n / 64, k / (2 * granularity), 64]`.
      format: of the weights; a tensor scale is left out.
      batch: number of independent products.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[splits * batch * m, n]`.
    """
    program = WgmmaProgram.of(
        x,
        codes,
        format=format,
        batch=batch,
        tiles=tiles,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct(
            (tiles.splits * x.shape[0], program.num_n * tiles.n), out_dtype
        ),
        **program.grid,
        num_threads=program.num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_wgmma_{format.name}",
        interpret=interpret,
    )(x, codes, scales)


class WgmmaProgram(DecodingProgram):
    """One warpgroup copies, the others decode and multiply."""

    def scratch_types(self) -> list[Any]:
        """Shared memory besides the pipeline's: result, partial sums, a stand-in's operand."""
        tiles = self.tiles
        scratch = [self.result((tiles.n // ROWS, tiles.m, ROWS))]
        if tiles.parts > 1:
            shape = (self.num_warpgroups, ROWS, tiles.m)
            scratch += [
                plgpu.SMEM(shape, jnp.float32),
                plgpu.Barrier(num_arrivals=self.num_warpgroups),
            ]
        if self.decoder.interpreted:
            scratch.append(plgpu.SMEM((self.num_warpgroups, ROWS, CHUNK), jnp.bfloat16))
        return scratch

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for the result, of which whole tiles are copied."""
        line = 128 // self.out_dtype.itemsize
        return plgpu.SMEM(shape, self.out_dtype, transforms=transforms(line, 128))

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem, out_smem, *scratch):
        """Copy, decode, multiply; then one copy of the result's tile."""
        self.multiply(
            (x_gmem, codes_gmem, scales_gmem),
            self.in_specs(),
            self.num_k // self.tiles.splits,
            functools.partial(self._store, out_smem, out_gmem),
            scratch,
        )

    def multiply(
        self,
        gmem: tuple[Any, ...],
        in_specs: list[Any],
        steps: Any,
        store: Callable[[Any, Any], None],
        scratch: tuple[Any, ...],
    ) -> None:
        """Copy, decode and multiply along k; then store the sums.

        Args:
          gmem: activations, codes and scales.
          in_specs: where they lie at each step.
          steps: how many; a program may know them, or read them.
          store: given the transposed sums `[64, m]` and which 64 rows of the weights' tile.
          scratch: partial sums, a stand-in's operand.
        """
        warpgroup = lax.axis_index("warpgroup")

        def compute(pipeline):
            shape = (ROWS, self.tiles.m)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC(shape, jnp.float32))
            def _(acc):
                pipeline(acc)
                if self.tiles.parts > 1:
                    self._add_parts(acc[...], store, *scratch[:2])
                else:
                    store(acc[...], warpgroup)

        def step(_, x_smem, codes_smem, scales_smem, acc):
            layout = plgpu.Layout.WGMMA
            for operand, columns in self.operands(codes_smem, scales_smem, warpgroup, layout):
                if self.decoder.interpreted:
                    operand = _through_smem(operand, scratch[-1], warpgroup)
                plgpu.wgmma(acc, operand, x_smem.at[:, columns].T)
            plgpu.wgmma_wait(0)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            memory_registers=_MEMORY_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=self.num_warpgroups,
            max_concurrent_steps=self.tiles.stages,
            compute_context=compute,
            in_specs=in_specs,
        )(*gmem)

    def _add_parts(
        self, sums: Any, store: Callable[[Any, Any], None], sums_smem: Any, written: Any
    ) -> None:
        """The sums of the warpgroups that share rows, added in their order by the first of them."""
        parts, warpgroup = self.tiles.parts, lax.axis_index("warpgroup")
        sums_smem[warpgroup] = sums
        plgpu.barrier_arrive(written)

        @pl.when(lax.rem(warpgroup, parts) == 0)
        def _():
            plgpu.barrier_wait(written)
            total = sums
            for part in range(1, parts):
                total += plgpu.load(sums_smem.at[warpgroup + part], layout=plgpu.Layout.WGMMA)
            store(total, lax.div(warpgroup, parts))

    def transposed(self, sums: Any) -> Any:
        """The result's numbers, so that shared memory takes them transposed once more."""
        return plgpu.layout_cast(sums.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)

    def columns(self, row_tile: Any) -> Any:
        """Columns of the result that 64 rows of the weights' tile give."""
        return pl.ds(lax.axis_index("n") * self.tiles.n + row_tile * ROWS, ROWS)

    def _store(self, out_smem: Any, out_gmem: Any, sums: Any, row_tile: Any) -> None:
        """The transposed sums, transposed again on their way through shared memory."""
        tile = out_smem.at[row_tile]
        tile.T[...] = self.transposed(sums)
        plgpu.commit_smem()
        first = lax.axis_index("split") * self.num_rows + lax.axis_index("row")
        rows = pl.ds(first * self.tiles.m, self.tiles.m)
        plgpu.copy_smem_to_gmem(tile, out_gmem.at[rows, self.columns(row_tile)])
        plgpu.wait_smem_to_gmem(0)


def _through_smem(operand: Any, operand_smem: Any, warpgroup: Any) -> Any:
    """For the interpreter, which lacks wgmma with a left operand in registers."""
    operand_smem[warpgroup] = operand
    plgpu.commit_smem()
    return operand_smem.at[warpgroup]
