"""Weights that `mx_jax.pack_weights` laid out for a GPU's kernels."""

import dataclasses
import functools
import math

import jax
import numpy as np

from mx_jax.backends.base import PackCall, Target
from mx_jax.backends.matrices import rejects_scale_axes
from mx_jax.backends.pallas_gpu import scaled
from mx_jax.backends.pallas_gpu import weights as layout
from mx_jax.backends.pallas_gpu.rejections import BLOCK_SCALED, rejects_machine, rejects_weights
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

Weights = layout.PackedWeights | scaled.ScaledOperand


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights",),
    meta_fields=("batch", "kept", "k", "k_first", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GpuWeights(PackedMXArray):
    """Weights `[*batch, *kept, *k]`, or `[*batch, *k, *kept]`, in a layout of the kernels'.

    Attributes:
      weights: what kernels read, a batch of matrices `[n, k]`: PackedWeights are decoded on their
        way to the tensor cores, a ScaledOperand goes there as it is.
      batch: sizes of the batch axes.
      kept: sizes of the kept axes.
      k: sizes of the contracted axes; blocks lie along the last.
      k_first: whether the contracted axes precede the kept ones.
      format: the block format.
      dtype: the dtype that was quantized.
    """

    weights: Weights
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
        return self.weights.stacked

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
        blocks, scale = matrices.scales.shape[-1] // math.prod(self.k[:-1]), matrices.tensor_scale
        return MXArray(
            codes=self.arrange(matrices.codes, self.batch, self.k),
            scales=self.arrange(matrices.scales, self.batch, (*self.k[:-1], blocks)),
            tensor_scale=None if scale is None else scale.reshape((1,) * len(self.shape)),
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
    reason = call.rejects_layout() or rejects_scale_axes(call, batch=False)
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


def pack(matrices: MXArray, call: PackCall, architecture: str) -> GpuWeights:
    """Weights that `rejects` lets through, here as `[batch, n, k]`.

    Decoding serves activations of any kind. So weights are laid out to be taken as they are only
    where that is possible and the call says that activations come in such a format.
    """
    ((_, block),) = call.blocks
    assert isinstance(block, int)
    format = call.format.with_block(block)
    as_it_is = architecture in BLOCK_SCALED and scaled.meet(call.lhs_format, format)
    lay_out = scaled.lay_out if as_it_is else layout.pack
    return GpuWeights(
        weights=lay_out(dataclasses.replace(matrices, format=format)),
        batch=call.shape[: call.num_batch],
        kept=tuple(call.shape[axis] for axis in call.kept),
        k=tuple(call.shape[axis] for axis in call.contracting),
        k_first=call.k_first,
        format=format,
        dtype=matrices.dtype,
    )
