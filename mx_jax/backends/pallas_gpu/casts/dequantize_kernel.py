"""Packed weights to bfloat16 in one pass over memory, for products of so many rows that XLA makes.

Device code only; `products/decoded.py` picks. A program decodes 64 rows of some groups of codes,
straight from memory to registers, and writes them on: programs are many and small, so while one
waits, others of its processor work. Where there is a tensor memory accelerator, values take the way
through shared memory, from which whole lines are copied; elsewhere threads write what they hold.

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
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, PAD_K, ROWS
from mx_jax.backends.pallas_gpu.stores import store
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Columns of a program, at most: enough loads to wait for together.
_COLUMNS = 512


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    *,
    format: BlockFormat,
    accelerated: bool,
    interpret: Any = None,
) -> jax.Array:
    """Weights as bfloat16, their tensor scale left out.

    Args:
      codes: int32 `[n / 64, k / group * planes, 64, words]`, as `PackedWeights` has them, batches
        merged.
      scales: int32 `[n / 64, k / (2 * granularity), 64]`.
      format: of the weights.
      accelerated: whether the GPU has a tensor memory accelerator: from Hopper on.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[n, k]`.
    """
    decoder = Decoder(format=format, interpreted=interpret is not None)
    tiles, pieces = codes.shape[:2]
    k = pieces // decoder.storage.planes * decoder.group
    columns = next(c for c in (_COLUMNS, _COLUMNS // 2, PAD_K) if k % c == 0)
    program = DequantizeProgram(decoder=decoder, columns=columns, accelerated=accelerated)
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles * ROWS, k), jnp.bfloat16),
        # CUDA lets only the last axis be long.
        grid=(k // columns, tiles),
        grid_names=("k", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_dequantize_{format.name}",
        interpret=interpret,
    )(codes, scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeProgram:
    """What the warpgroup of each program runs.

    Attributes:
      decoder: of the weights.
      columns: that it decodes.
      accelerated: as `dequantize` has it.
    """

    decoder: Decoder
    columns: int
    accelerated: bool

    def scratch_types(self) -> list[Any]:
        """Shared memory for the values, in chunks of 64 columns."""
        if not self.accelerated:
            return []
        transforms = plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(2 * CHUNK)
        shape = (self.columns // CHUNK, ROWS, CHUNK)
        return [plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)]

    def body(self, codes_gmem, scales_gmem, out_gmem, *values_smem):
        """Decode, write."""
        decoder, accelerated = self.decoder, self.accelerated
        layout = plgpu.Layout.WGMMA if accelerated else plgpu.Layout.MMA_LHS(jnp.bfloat16)
        tile, part = lax.axis_index("tile"), lax.axis_index("k")
        groups, planes = self.columns // decoder.group, decoder.storage.planes
        rows = pl.ds(tile * ROWS, ROWS)
        chunk = 0
        for i in range(groups):
            group = part * groups + i
            operands = decoder.operands(
                codes_gmem.at[tile, pl.ds(group * planes, planes)],
                scales_gmem.at[tile, pl.ds(group * decoder.pairs, decoder.pairs)],
                layout,
            )
            for values in operands:
                columns = pl.ds(part * self.columns + chunk * CHUNK, CHUNK)
                out = out_gmem.at[rows, columns]
                if accelerated:
                    values_smem[0][chunk] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(values_smem[0].at[chunk], out)
                else:
                    store(out, values)
                chunk += 1
        if accelerated:
            plgpu.wait_smem_to_gmem(0)
