"""Weights that `mx_jax.pack_weights` laid out for a GPU's kernels."""

import dataclasses
import functools
import math

import jax
import numpy as np

from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights",),
    meta_fields=("kept", "k", "k_first", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GpuWeights(PackedMXArray):
    """Weights `[*batch, *kept, *k]`, or `[*batch, *k, *kept]`, in a layout of the kernels'.

    Attributes:
      weights: what kernels read, matrices `[n, k]`: PackedWeights are decoded on their way to the
        tensor cores, a ScaledOperand goes there as it is. Every array of a stack has the batch
        axes in front, so that scan and vmap may slice it.
      kept: sizes of the kept axes.
      k: sizes of the contracted axes; blocks lie along the last.
      k_first: whether the contracted axes precede the kept ones.
      format: the block format.
      dtype: the dtype that was quantized.
    """

    weights: PackedWeights | ScaledOperand
    kept: tuple[int, ...]
    k: tuple[int, ...]
    k_first: bool
    format: BlockFormat
    dtype: np.dtype

    @property
    def backend(self) -> str:
        return "pallas_gpu"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weights.stacked, *self.matrix_axes(self.k))

    def serves(self, contracting: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        num_batch = len(self.weights.stacked)
        start = num_batch + (0 if self.k_first else len(self.kept))
        axes = tuple(range(start, start + len(self.k)))
        return batch == tuple(range(num_batch)) and contracting == axes

    def unpack(self) -> MXArray:
        if self.weights.stacked:
            return jax.vmap(GpuWeights.unpack)(self)
        matrices = self.weights.unpack()
        blocks, scale = matrices.scales.shape[-1] // math.prod(self.k[:-1]), matrices.tensor_scale
        return MXArray(
            codes=self.arrange(matrices.codes, (), self.k),
            scales=self.arrange(matrices.scales, (), (*self.k[:-1], blocks)),
            tensor_scale=None if scale is None else scale.reshape((1,) * len(self.shape)),
            format=self.format,
            blocks=self.blocks,
            dtype=self.dtype,
        )
