"""Kernel of Ampere, Ada and Blackwell: bfloat16 activations by weights decoded on their way to mma.

Device code only; `products.py` picks. One warpgroup copies tiles into shared memory
some steps ahead (by cp.async; by TMA where Mosaic finds it), loads its codes and scales from there,
decodes them to bfloat16 and multiplies by mma, synchronously. As on Hopper the product is computed
transposed, `weights[n, k] x activations[m, k]`: few activations then need no padding beyond 8 rows.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.architecture import Tiles
from mx_jax.backends.pallas_gpu.decode import Decoder, DecodingProgram
from mx_jax.backends.pallas_gpu.device import plgpu, share
from mx_jax.backends.pallas_gpu.layouts import ROWS
from mx_jax.formats import BlockFormat


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    n: int,
    format: BlockFormat,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    interpret: object = None,
) -> jax.Array:
    """The product `[batch, m, n]`: arguments as of `wgmma.multiply`; `tiles.k` divides k'."""
    decoder = Decoder(format=format, interpreted=interpret is not None)
    batch, m, k = x.shape
    padded_k = codes.shape[2] * decoder.group
    x = jnp.pad(x, ((0, 0), (0, -m % tiles.m), (0, padded_k - k)))
    program = MmaProgram(
        decoder=decoder,
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        batch=batch,
        num_m=-(-m // tiles.m),
        num_n=-(-n // tiles.n),
        num_k=padded_k // tiles.k,
        weight_tiles=codes.shape[1],
    )
    rows, columns = batch * x.shape[1], program.num_n * tiles.n
    out = plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * columns, rows), out_dtype),
        grid=(tiles.splits, program.num_n, batch * program.num_m),
        grid_names=("split", "n", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=f"mx_jax_mma_{format.name}",
        interpret=interpret,
    )(
        x.reshape(rows, padded_k),
        *(array.reshape(-1, *array.shape[2:]) for array in (codes, scales)),
    )
    # Few rows: XLA transposes on the way to the sum over splits.
    out = out.reshape(tiles.splits, columns, batch, -1).transpose(0, 2, 3, 1)[:, :, :m, :n]
    return out[0] if tiles.splits == 1 else out.sum(0)


class MmaProgram(DecodingProgram):
    """One warpgroup copies, decodes and multiplies by turns."""

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem):
        """Copy, decode, multiply; then store the sums from registers."""
        tiles = self.tiles
        begin, count = share(lax.axis_index("split"), tiles.splits, self.num_k)
        zeros = jnp.zeros((ROWS, tiles.m), jnp.float32)
        acc = plgpu.emit_pipeline(
            self._step,
            grid=(count,),
            max_concurrent_steps=tiles.stages,
            init_carry=plgpu.layout_cast(zeros, plgpu.Layout.MMA_ACC(jnp.bfloat16)),
            in_specs=self._in_specs(begin),
        )(x_gmem, codes_gmem, scales_gmem)
        first = lax.axis_index("split") * self.num_n + lax.axis_index("n")
        rows = pl.ds(first * tiles.n, tiles.n)
        columns = pl.ds(lax.axis_index("row") * tiles.m, tiles.m)
        plgpu.store(out_gmem.at[rows, columns], acc.astype(self.out_dtype), optimized=False)

    def _in_specs(self, begin: Any) -> list[Any]:
        """Blocks of the activations, codes and scales of each step from the first on."""
        row = lax.axis_index("row")
        tile = lax.div(row, jnp.int32(self.num_m)) * self.weight_tiles + lax.axis_index("n")
        index_maps = (
            lambda i: (row, begin + i),
            lambda i: (tile, begin + i, 0, 0),
            lambda i: (tile, begin + i, 0),
        )
        return [
            plgpu.BlockSpec(shape, at, transforms=how)
            for (shape, _, how), at in zip(self.blocks, index_maps, strict=True)
        ]

    def _step(self, _, x_smem, codes_smem, scales_smem, acc):
        """One step along k."""
        interpreted = self.decoder.interpreted
        weights, activations = (
            layout(jnp.bfloat16) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
        )
        for operand, columns in self.operands(codes_smem, scales_smem, 0, weights):
            x = plgpu.load(x_smem.at[:, columns].T, layout=activations)
            acc = _mma(acc, operand, x, interpreted)
        if interpreted:
            # Where Mosaic compiles a copy, the warpgroup first waits for its reads; the interpreter
            # does not know.
            plgpu.commit_smem()
        return acc


def _mma(acc: Any, weights: Any, x: Any, interpreted: bool) -> Any:
    """`acc + weights[64, 64] x[64, m]`: a plain product in the interpreter, which lacks mma."""
    if interpreted:
        return acc + jnp.dot(weights, x, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, weights, x)
