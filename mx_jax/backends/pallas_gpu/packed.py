"""Weights that `mx_jax.pack_weights` laid out for a GPU's kernels."""

import dataclasses
import functools
import math

import jax
import numpy as np

from mx_jax.backends.base import PackCall, Target
from mx_jax.backends.pallas_gpu import weights as layout
from mx_jax.backends.pallas_gpu.rejections import (
    ARCHITECTURES,
    BLOCK_SCALED,
    rejects_machine,
    rejects_weights,
)
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "scales", "tensor_scale"),
    meta_fields=("batch", "kept", "k", "k_first", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GpuWeights(PackedMXArray):
    """Weights `[*batch, *kept, *k]`, or `[*batch, *k, *kept]`, in the kernels' layout.

    Attributes:
      weights: what kernels read: a batch of matrices `[n, k]`.
      scales: the bytes as they came, `[batch, n, blocks]`: what kernels read of a block with a NaN
        among its codes is a NaN scale.
      tensor_scale: as it came (NVFP4), else None.
      batch: sizes of the batch axes.
      kept: sizes of the kept axes.
      k: sizes of the contracted axes; blocks lie along the last.
      k_first: whether the contracted axes precede the kept ones.
      format: the block format.
      dtype: the dtype that was quantized.
    """

    weights: layout.PackedWeights
    scales: jax.Array
    tensor_scale: jax.Array | None
    batch: tuple[int, ...]
    kept: tuple[int, ...]
    k: tuple[int, ...]
    k_first: bool
    format: BlockFormat
    dtype: np.dtype

    @property
    def backend(self) -> str:
        return "pallas_gpu"

    @property
    def _stacked(self) -> tuple[int, ...]:
        """Leading axes that vmap stacked."""
        return self.scales.shape[:-3]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._stacked, *self.batch, *self.matrix_axes(self.k))

    def serves(self, contracting: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        start = len(self.batch) + (0 if self.k_first else len(self.kept))
        axes = tuple(range(start, start + len(self.k)))
        leads = batch == tuple(range(len(self.batch)))
        return not self._stacked and leads and contracting == axes

    def unpack(self) -> MXArray:
        if self._stacked:
            return jax.vmap(GpuWeights.unpack)(self)
        matrices = self.weights.unpack()
        last = matrices.codes.shape[-1] // math.prod(self.k[:-1])
        blocks = self.scales.shape[-1] // math.prod(self.k[:-1])
        return MXArray(
            codes=self.arrange(matrices.codes, self.batch, (*self.k[:-1], last)),
            scales=self.arrange(self.scales, self.batch, (*self.k[:-1], blocks)),
            tensor_scale=self.tensor_scale,
            format=self.format,
            blocks=self.blocks,
            dtype=self.dtype,
        )


def rejects(
    call: PackCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why weights are not packed for a machine, or None."""
    reason = rejects_machine(target, jax_version)
    if reason is not None:
        return reason
    assert target.compute_capability is not None
    if ARCHITECTURES[target.compute_capability] in BLOCK_SCALED:
        return "packs no weights for Blackwell, whose tensor cores take both operands as they are"
    reason = call.rejects_layout()
    if reason is not None:
        return reason
    ((_, block),) = call.blocks
    if not isinstance(block, int):
        return f"packs blocks that end, got blocks={call.blocks}"
    reason = rejects_weights(call.format.with_block(block))
    if reason is not None:
        return f"packs weights in a block format: this {reason}"
    if 0 in call.shape:
        return f"packs weights that have elements, got shape={call.shape}"
    return None


def pack(x: MXArray, matrices: MXArray, call: PackCall) -> GpuWeights:
    """Weights that `rejects` lets through; `matrices` are x as `[batch, n, k]`."""
    ((_, block),) = call.blocks
    assert isinstance(block, int)
    return GpuWeights(
        weights=layout.pack(dataclasses.replace(matrices, format=call.format.with_block(block))),
        scales=matrices.scales,
        tensor_scale=x.tensor_scale,
        batch=call.shape[: call.num_batch],
        kept=tuple(call.shape[axis] for axis in call.kept),
        k=tuple(call.shape[axis] for axis in call.contracting),
        k_first=call.k_first,
        format=call.format.with_block(block),
        dtype=x.dtype,
    )
