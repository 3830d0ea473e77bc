"""Weights laid out once for many products: which, and for which kernel."""

import dataclasses

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import PackCall
from mx_jax.backends.pallas_gpu.architecture import (
    Architecture,
    current_architecture,
    rejects_machine,
)
from mx_jax.backends.pallas_gpu.layouts.packed import MATRICES
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.products.rejections import rejects_weights
from mx_jax.backends.sums import as_matrices, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


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
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    return None


def pack_weights(
    x: MXArray, call: PackCall, *, architecture: Architecture | None = None
) -> PackedMXArray:
    """Weights that `rejects` lets through, in a layout that `packed_matmul` reads.

    Decoding serves activations of any kind. So weights are laid out to be taken as they are only
    where that is possible and the call says that activations come in such a format.
    """
    matrices, _ = as_matrices(x, call.weights.axes)
    ((_, block),) = call.blocks
    assert isinstance(matrices, MXArray) and isinstance(block, int)
    format = call.format.with_block(block)
    kernel = (architecture or current_architecture()).kernel(call.lhs_format, format)
    _, kept, k = call.weights.axes.sizes(call.weights.shape)
    return PackedMXArray(
        arrays=_stack(dataclasses.replace(matrices, format=format), call, kernel.layout),
        layout=MATRICES,
        kept=kept,
        k=k,
        k_first=call.weights.axes.k_first,
        format=format,
        dtype=matrices.dtype,
    )


def _stack(
    matrices: MXArray, call: PackCall, layout: type[PackedWeights] | type[ScaledOperand]
) -> PackedWeights | ScaledOperand:
    """Matrices `[batch, n, k]` laid out one by one, `[*batch]` in front of every array."""
    batch, _, _ = call.weights.axes.sizes(call.weights.shape)
    if not batch:
        return layout.of(matrices)
    scale = matrices.tensor_scale
    if scale is not None:
        scale = jnp.broadcast_to(scale, (matrices.shape[0], 1, 1))[:, None]
    singles = dataclasses.replace(
        matrices,
        codes=matrices.codes[:, None],
        scales=matrices.scales[:, None],
        tensor_scale=scale,
    )
    stacked = jax.vmap(layout.of)(singles)
    return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), stacked)
