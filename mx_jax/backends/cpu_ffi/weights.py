"""Weights packed once, ahead of time, in the order in which the CPU's kernels read them.

A product of few rows, as in decoding, is bound by reading its weights. Packed, codes take the bits
of their format, and every instruction set reads them in one stream.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from mx_jax.axes import Axes
from mx_jax.backends.calls import OperandType, PackCall
from mx_jax.backends.cpu_ffi import library, panels, parts, rejections, rows
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.panels import PANEL_ROWS, Panels
from mx_jax.backends.sums import rejects_scale_axes
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, Layout, PackedMXArray

TARGET = "mx_jax_cpu_pack_weights"


def in_parts(packed: PackedMXArray, number: int) -> PackedMXArray:
    """The same weights with k in so many parts, so that devices can share it."""
    weights = parts.apart(packed.unpack(), packed, number)
    axes = Axes.ordered(
        batch=len(packed.batch) + 1,
        kept=len(packed.kept),
        contracting=len(packed.k),
        k_first=packed.k_first,
    )
    call = PackCall(
        weights=OperandType.of(weights, axes), blocks=weights.blocks, dtype=packed.dtype
    )
    arrays = dataclasses.replace(packed.arrays, bytes=pack(weights, call).arrays.bytes)
    layout = dataclasses.replace(PARTS, parts=number)
    return dataclasses.replace(packed, arrays=arrays, layout=layout)


def _cut(packed: PackedMXArray) -> Cut:
    """How devices may cut panels: between them."""
    return parts.cut(packed, number=None, in_parts=in_parts)


def _cut_parts(packed: PackedMXArray) -> Cut:
    return parts.cut(packed, number=packed.arrays.bytes.shape[-3], in_parts=in_parts)


PANELS = Layout(
    backend="cpu_ffi",
    batch=panels.batch_of,
    unpack=panels.unpack,
    take=panels.take,
    cut=_cut,
    local=parts.local,
)
PARTS = Layout(
    backend="cpu_ffi",
    batch=parts.batch_of,
    unpack=parts.unpack,
    cut=_cut_parts,
    local=parts.local,
    parts=1,
)


def rejects(call: PackCall) -> str | None:
    """Why weights cannot be packed here, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without packed weights; build it again"
    if rejections.plain_format(call.format) is not None:
        return rows.rejects_weights(call)
    return (
        rejections.rejects_format(call.format)
        or call.rejects_layout()
        or rejects_scale_axes(call, batch=True)
    )


def pack(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects` lets through, in the kernels' order."""
    if rejections.plain_format(call.format) is not None:
        return rows.with_scales(pack(*rows.codes_alone(x, call)), x, call)
    ((_, block),) = call.blocks
    assert isinstance(block, int), call.blocks
    format = call.format.with_block(block)
    axes = call.weights.axes
    batch, kept, k = axes.sizes(call.weights.shape)

    element, scale = rejections.names(format)
    given = "*b k n, *b k/{block} n" if axes.k_first else "*b n k, *b n k/{block}"
    handler = Handler(
        target=TARGET,
        axes=f"{given.format(block=block)} -> *b n/{PANEL_ROWS} bytes",
        dtypes=(np.dtype("uint8"),),
        attributes=hashable(
            {"element": element, "scale": scale, "block": np.int32(block), "k_first": axes.k_first}
        ),
        sizes=(("bytes", panels.panel_bytes(format, math.prod(k))),),
    )
    (packed,) = handler(axes.as_matrices(x.codes), axes.as_matrices(x.scales))
    tensor_scale = x.tensor_scale
    if tensor_scale is not None:
        # One for each matrix: scan slices every array of a stack along the same axes.
        tensor_scale = tensor_scale.reshape(tensor_scale.shape[: len(batch)])
        tensor_scale = jnp.broadcast_to(tensor_scale, batch)
    return PackedMXArray(
        arrays=Panels(bytes=packed, tensor_scale=tensor_scale),
        layout=PANELS,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=format,
        dtype=x.dtype,
    )
