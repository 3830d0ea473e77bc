"""Kernel of Ampere, Ada and Blackwell: bfloat16 activations by weights decoded on their way to mma.

Device code only; `matmul.py` checks, pads and picks. One warpgroup copies tiles into shared memory
some steps ahead (by cp.async; by TMA where Mosaic finds it), loads its codes and scales from there,
decodes them to bfloat16 and multiplies by mma, synchronously. As on Hopper the product is computed
transposed, `weights[n, k] x activations[m, k]`: few activations then need no padding beyond 8 rows.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
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

# Activations are loaded by chunks: 64 bfloat16, 128 bytes.
_SWIZZLE = 2 * CHUNK


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
    """Partial products of padded operands; arguments and result as `kernel_sm90.matmul` has them.

    `tiles.n` is 64, and a multiple of 8 rows of activations makes `tiles.m`.
    """
    (rows, k), n = x.shape, codes.shape[0] // batch * ROWS
    program = _Program(
        decoder=Decoder(format=format, interpreted=interpret is not None),
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        num_m=rows // batch // tiles.m,
        num_n=n // tiles.n,
        num_k=k // tiles.k,
        num_rows=rows // tiles.m,
    )
    out = plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * n, rows), out_dtype),
        grid=(tiles.splits, program.num_n, program.num_rows),
        grid_names=("split", "n", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=f"mx_jax_sm80_{format.name}",
        interpret=interpret,
    )(x, codes, scales)
    # Few rows: XLA transposes on the way to the sum over splits.
    return out.reshape(tiles.splits, n, rows).swapaxes(1, 2).reshape(-1, n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """What the warpgroup of each program runs.

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

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem):
        """Copy, decode, multiply; then store the sums from registers."""
        tiles, bfloat16 = self.tiles, jnp.bfloat16
        zeros = jnp.zeros((ROWS, tiles.m), jnp.float32)
        acc = plgpu.emit_pipeline(
            self._step,
            grid=(self.num_k // tiles.splits,),
            max_concurrent_steps=tiles.stages,
            init_carry=plgpu.layout_cast(zeros, plgpu.Layout.MMA_ACC(bfloat16)),
            in_specs=self._in_specs(),
        )(x_gmem, codes_gmem, scales_gmem)
        first = lax.axis_index("split") * self.num_n + lax.axis_index("n")
        rows = pl.ds(first * tiles.n, tiles.n)
        columns = pl.ds(lax.axis_index("row") * tiles.m, tiles.m)
        plgpu.store(out_gmem.at[rows, columns], acc.astype(self.out_dtype), optimized=False)

    def _step(self, _, x_smem, codes_smem, scales_smem, acc):
        """One step along k."""
        decoder, bfloat16 = self.decoder, jnp.bfloat16
        for group in range(self.tiles.k // decoder.group):
            operands = decoder.operands(
                codes_smem.at[0, group],
                scales_smem.at[0, pl.ds(group * decoder.pairs, decoder.pairs)],
                plgpu.Layout.MMA_LHS(bfloat16),
            )
            for chunk, operand in enumerate(operands):
                columns = pl.ds(group * decoder.group + chunk * CHUNK, CHUNK)
                x = plgpu.load(x_smem.at[:, columns].T, layout=plgpu.Layout.MMA_RHS(bfloat16))
                acc = _mma(acc, operand, x, decoder.interpreted)
        if decoder.interpreted:
            # Where Mosaic compiles a copy, the warpgroup first waits for its reads; the interpreter
            # does not know.
            plgpu.commit_smem()
        return acc

    def _in_specs(self) -> list[Any]:
        """Where each step's activations, codes and scales lie.

        cp.async takes what has no tiling for one piece of memory, and says nothing if it is not:
        codes and scales of one tile of rows are.
        """
        tiles, decoder = self.tiles, self.decoder
        row = lax.axis_index("row")
        tile = lax.div(row, self.num_m) * self.num_n + lax.axis_index("n")
        first = lax.axis_index("split") * (self.num_k // tiles.splits)
        transforms = plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(_SWIZZLE)
        codes = (1, tiles.k // decoder.group, ROWS, WORDS)
        scales = (1, tiles.k // (2 * decoder.granularity), ROWS)
        blocks = (
            ((tiles.m, tiles.k), lambda i: (row, first + i), transforms),
            (codes, lambda i: (tile, first + i, 0, 0), ()),
            (scales, lambda i: (tile, first + i, 0), ()),
        )
        return [plgpu.BlockSpec(shape, at, transforms=how) for shape, at, how in blocks]


def _mma(acc: Any, weights: Any, x: Any, interpreted: bool) -> Any:
    """`acc + weights[64, 64] x[64, m]`: a plain product in the interpreter, which lacks mma."""
    if interpreted:
        return acc + jnp.dot(weights, x, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, weights, x)
