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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.architecture import Tiles
from mx_jax.backends.pallas_gpu.decode import Decoder
from mx_jax.backends.pallas_gpu.device import plgpu, share
from mx_jax.backends.pallas_gpu.layouts import ROWS, PackedWeights


def multiply(
    x: jax.Array,
    weights: PackedWeights,
    tiles: Tiles,
    out_dtype: np.dtype,
    interpret: Any = None,
) -> jax.Array:
    """The product `[batch, m, n]`: arguments as of `wgmma.multiply`; `tiles.k` divides k'."""
    interpreted, format, n = interpret is not None, weights.format, weights.shape[1]
    decoder, codes = Decoder(format=format, interpreted=interpreted), weights.codes
    batch, m, k = x.shape
    padded_k = codes.shape[2] * decoder.group
    x = jnp.pad(x, ((0, 0), (0, -m % tiles.m), (0, padded_k - k)))
    weight_tiles, num_m, num_n = codes.shape[1], -(-m // tiles.m), -(-n // tiles.n)
    rows, columns = batch * x.shape[1], num_n * tiles.n

    def body(x_gmem, codes_gmem, scales_gmem, out_gmem):
        split, column, row = map(lax.axis_index, ("split", "n", "row"))
        begin, count = share(split, tiles.splits, padded_k // tiles.k)
        tile = lax.div(row, jnp.int32(num_m)) * weight_tiles + column
        index_maps = (
            lambda i: (row, begin + i),
            lambda i: (tile, begin + i, 0, 0),
            lambda i: (tile, begin + i, 0),
        )
        zeros = jnp.zeros((ROWS, tiles.m), jnp.float32)
        acc = plgpu.emit_pipeline(
            step,
            grid=(count,),
            max_concurrent_steps=tiles.stages,
            init_carry=plgpu.layout_cast(zeros, plgpu.Layout.MMA_ACC(jnp.bfloat16)),
            in_specs=[
                plgpu.BlockSpec(shape, at, transforms=how)
                for (shape, _, how), at in zip(decoder.blocks(tiles), index_maps, strict=True)
            ],
        )(x_gmem, codes_gmem, scales_gmem)
        rows = pl.ds((split * num_n + column) * tiles.n, tiles.n)
        # From registers.
        out = acc.astype(out_dtype)
        plgpu.store(out_gmem.at[rows, pl.ds(row * tiles.m, tiles.m)], out, optimized=False)

    def step(_, x_smem, codes_smem, scales_smem, acc):
        weights, activations = (
            layout(jnp.bfloat16) for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
        )
        for operand, columns in decoder.step(codes_smem, scales_smem, 0, tiles.k, weights):
            right = plgpu.load(x_smem.at[:, columns].T, layout=activations)
            if interpreted:
                # The interpreter lacks mma.
                acc += jnp.dot(operand, right, preferred_element_type=jnp.float32)
            else:
                acc = plgpu.mma(acc, operand, right)
        if interpreted:
            # Where Mosaic compiles a copy, the warpgroup first waits for its reads; the interpreter
            # does not know.
            plgpu.commit_smem()
        return acc

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * columns, rows), out_dtype),
        grid=(tiles.splits, num_n, batch * num_m),
        grid_names=("split", "n", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=f"mx_jax_mma_{format.name}",
        interpret=interpret,
    )(
        x.reshape(rows, padded_k),
        *(array.reshape(-1, *array.shape[2:]) for array in (codes, weights.scales)),
    )
    # Few rows: XLA transposes on the way to the sum over splits.
    out = out.reshape(tiles.splits, columns, batch, -1).transpose(0, 2, 3, 1)[:, :, :m, :n]
    return out[0] if tiles.splits == 1 else out.sum(0)
