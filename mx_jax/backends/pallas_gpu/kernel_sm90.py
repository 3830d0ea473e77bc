"""Hopper's kernel: bfloat16 activations by block-scaled weights, decoded on their way to wgmma.

Device code only; `matmul.py` checks, pads and picks. A program computes the transposed product
`weights[n, k] x activations[m, k]`, because wgmma takes its left operand from registers: one
warpgroup copies tiles into shared memory, the others load codes and scales from there, decode them
to bfloat16 and multiply. Each waits for the other at barriers, one pair for a stage.

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

from mx_jax.backends.pallas_gpu.decode import Decoder
from mx_jax.backends.pallas_gpu.tuning import Tiles
from mx_jax.backends.pallas_gpu.weights import CHUNK, ROWS, WORDS
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# The memory warpgroup only issues copies: it gives the others its registers.
_MEMORY_REGISTERS = 40
# The left operand in registers is 64 bfloat16 wide, 128 bytes, and so is its part of x.
_OPERAND_SWIZZLE = 2 * CHUNK


def matmul(
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
    rows, n = x.shape[0], codes.shape[0] // batch * ROWS
    program = _Program(
        decoder=Decoder(format=format, interpreted=interpret is not None),
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        num_m=rows // batch // tiles.m,
        num_n=n // tiles.n,
        num_k=x.shape[1] // tiles.k,
        num_rows=rows // tiles.m,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * rows, n), out_dtype),
        # The last axis runs fastest, so that programs which share weights run together; it is also
        # the only one that CUDA lets be long.
        grid=(tiles.splits, program.num_n, program.num_rows),
        grid_names=("split", "n", "row"),
        num_threads=tiles.n // ROWS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_sm90_{format.name}",
        interpret=interpret,
    )(x, codes, scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """What every warpgroup of the grid runs.

    Attributes:
      decoder: of the weights.
      tiles: sizes.
      out_dtype: of the result.
      num_m: tiles along m of one product of the batch.
      num_n: tiles along n.
      num_k: steps along k, all splits together.
      num_rows: tiles along m of the whole batch.
    """

    decoder: Decoder
    tiles: Tiles
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    num_rows: int

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that multiply, 64 rows of weights each."""
        return self.tiles.n // ROWS

    def scratch_types(self) -> list[Any]:
        """Shared memory besides the pipeline's: the result's tile, a stand-in's operand."""
        line = 128 // self.out_dtype.itemsize
        tile = (self.num_warpgroups, self.tiles.m, ROWS)
        scratch = [plgpu.SMEM(tile, self.out_dtype, transforms=_transforms(line, 128))]
        if self.decoder.interpreted:
            scratch.append(plgpu.SMEM((self.num_warpgroups, ROWS, CHUNK), jnp.bfloat16))
        return scratch

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem, out_smem, *operand_smem):
        """Copy, decode, multiply; then one copy of the result's tile."""
        warpgroup = lax.axis_index("warpgroup")

        def compute(pipeline):
            shape = (ROWS, self.tiles.m)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC(shape, jnp.float32))
            def _(acc):
                pipeline(acc)
                self._store(acc, out_smem.at[warpgroup], out_gmem, warpgroup)

        def step(_, x_smem, codes_smem, scales_smem, acc):
            decoder = self.decoder
            for group in range(self.tiles.k // decoder.group):
                operands = decoder.operands(
                    codes_smem.at[warpgroup, group],
                    scales_smem.at[warpgroup, pl.ds(group * decoder.pairs, decoder.pairs)],
                    plgpu.Layout.WGMMA,
                )
                for chunk, operand in enumerate(operands):
                    if decoder.interpreted:
                        operand = _through_smem(operand, operand_smem[0], warpgroup)
                    columns = pl.ds(group * decoder.group + chunk * CHUNK, CHUNK)
                    plgpu.wgmma(acc, operand, x_smem.at[:, columns].T)
            plgpu.wgmma_wait(0)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(self.num_k // self.tiles.splits,),
            memory_registers=_MEMORY_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=self.num_warpgroups,
            max_concurrent_steps=self.tiles.stages,
            compute_context=compute,
            in_specs=self._in_specs(),
        )(x_gmem, codes_gmem, scales_gmem)

    def _in_specs(self) -> list[Any]:
        """Where each step's activations, codes and scales lie."""
        tiles, decoder = self.tiles, self.decoder
        n_index, row = lax.axis_index("n"), lax.axis_index("row")
        index = lax.div(row, self.num_m)
        first = lax.axis_index("split") * (self.num_k // tiles.splits)
        return [
            plgpu.BlockSpec(
                (tiles.m, tiles.k),
                lambda i: (row, first + i),
                transforms=_transforms(CHUNK, _OPERAND_SWIZZLE),
            ),
            plgpu.BlockSpec(
                (self.num_warpgroups, tiles.k // decoder.group, ROWS, WORDS),
                lambda i: (index * self.num_n + n_index, first + i, 0, 0),
            ),
            plgpu.BlockSpec(
                (self.num_warpgroups, tiles.k // (2 * decoder.granularity), ROWS),
                lambda i: (index * self.num_n + n_index, first + i, 0),
            ),
        ]

    def _store(self, acc: Any, tile: Any, out_gmem: Any, warpgroup: Any) -> None:
        """The transposed sums, transposed again on their way through shared memory."""
        sums = acc[...].astype(self.out_dtype)
        tile.T[...] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        first = lax.axis_index("split") * self.num_rows + lax.axis_index("row")
        rows = pl.ds(first * self.tiles.m, self.tiles.m)
        columns = pl.ds(lax.axis_index("n") * self.tiles.n + warpgroup * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(tile, out_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def _transforms(columns: int, swizzle: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def _through_smem(operand: Any, operand_smem: Any, warpgroup: Any) -> Any:
    """For the interpreter, which lacks wgmma with a left operand in registers."""
    operand_smem[warpgroup] = operand
    plgpu.commit_smem()
    return operand_smem.at[warpgroup]
