"""Weights that `mx_jax.pack_weights` laid out for a GPU's kernels.

Their arrays are what kernels read, matrices `[n, k]`: PackedWeights are decoded on their way to the
tensor cores, a ScaledOperand goes there as it is.
"""

import math

import jax

from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray


def unpack(packed: PackedMXArray) -> MXArray:
    """The weights that the kernels' arrays were made of."""
    if packed.batch:
        return jax.vmap(unpack)(packed)
    matrices = packed.arrays.unpack()
    blocks, scale = matrices.scales.shape[-1] // math.prod(packed.k[:-1]), matrices.tensor_scale
    return MXArray(
        codes=packed.arrange(matrices.codes, (), packed.k),
        scales=packed.arrange(matrices.scales, (), (*packed.k[:-1], blocks)),
        tensor_scale=None if scale is None else scale.reshape((1,) * packed.ndim),
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def batch_of(weights: PackedWeights | ScaledOperand) -> tuple[int, ...]:
    """Sizes of the batch axes."""
    return weights.stacked


MATRICES = Layout(backend="pallas_gpu", batch=batch_of, unpack=unpack)
