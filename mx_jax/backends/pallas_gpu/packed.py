"""Weights that `mx_jax.pack_weights` laid out for a GPU's kernels."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
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

    weights: Weights
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
        weights=_stack(dataclasses.replace(matrices, format=format), call, lay_out),
        kept=tuple(call.shape[axis] for axis in call.kept),
        k=tuple(call.shape[axis] for axis in call.contracting),
        k_first=call.k_first,
        format=format,
        dtype=matrices.dtype,
    )


def _stack(matrices: MXArray, call: PackCall, lay_out: Callable[[MXArray], Weights]) -> Weights:
    """Matrices `[batch, n, k]` laid out one by one, `[*batch]` in front of every array."""
    if not call.num_batch:
        return lay_out(matrices)
    batch, (count, *_) = call.shape[: call.num_batch], matrices.shape
    scale = matrices.tensor_scale
    singles = dataclasses.replace(
        matrices,
        codes=matrices.codes[:, None],
        scales=matrices.scales[:, None],
        tensor_scale=None if scale is None else jnp.broadcast_to(scale, (count, 1, 1))[:, None],
    )
    stacked = jax.vmap(lay_out)(singles)
    return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), stacked)
