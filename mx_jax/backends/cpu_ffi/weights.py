"""Weights packed once, ahead of time, in the order in which the CPU's kernels read them.

A product of few rows, as in decoding, is bound by reading its weights. Packed, FP4 takes half a
byte a code, and every instruction set reads it in one stream.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import PackCall
from mx_jax.backends.cpu_ffi import library, rejections
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.matrices import rejects_scale_axes
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

TARGET = "mx_jax_cpu_pack_weights"

PANEL_ROWS = 32
_CHUNK = 32  # along k
_SUMMARY = 64  # bytes at the end of a panel; all as in custom_calls/products/weights.h


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("bytes", "tensor_scale"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Panels:
    """Weights panel by panel.

    Attributes:
      bytes: uint8 `[*batch, ceil(n / 32), bytes of a panel]`, with n the product of kept.
      tensor_scale: float32 `[*batch]` (NVFP4), else None.
    """

    bytes: jax.Array
    tensor_scale: jax.Array | None


def batch_of(panels: Panels) -> tuple[int, ...]:
    """Sizes of the batch axes."""
    return panels.bytes.shape[:-2]


def unpack(packed: PackedMXArray) -> MXArray:
    """The weights that panels were made of."""
    panels, scale = packed.arrays.bytes, packed.arrays.tensor_scale
    rows, k = math.prod(packed.kept), math.prod(packed.k)
    per_word = 8 if packed.format.element.bits == 4 else 4
    block = rejections.block_size(packed.format)
    chunks, blocks = -(-k // _CHUNK), -(-k // _CHUNK) * (_CHUNK // block)
    batch, num_panels = panels.shape[:-2], panels.shape[-2]
    code_bytes = chunks * _CHUNK * PANEL_ROWS * 4 // per_word
    words = panels[..., :code_bytes].reshape(*batch, num_panels, -1, PANEL_ROWS, 4)
    if per_word == 8:
        words = jnp.concatenate([words & 15, words >> 4], axis=-1)
    padded_rows = num_panels * PANEL_ROWS
    codes = jnp.swapaxes(words, -3, -2).reshape(*batch, padded_rows, chunks * _CHUNK)
    scales = panels[..., code_bytes : code_bytes + blocks * PANEL_ROWS]
    scales = jnp.swapaxes(scales.reshape(*batch, num_panels, blocks, PANEL_ROWS), -2, -1)
    scales = scales.reshape(*batch, padded_rows, blocks)
    scale_k = (*packed.k[:-1], -(-packed.k[-1] // block))
    ones = (1,) * (len(packed.kept) + len(packed.k))
    return MXArray(
        codes=packed.arrange(codes[..., :rows, :k], batch, packed.k),
        scales=packed.arrange(scales[..., :rows, : math.prod(scale_k)], batch, scale_k),
        tensor_scale=None if scale is None else scale.reshape(*scale.shape, *ones),
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def take(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows of the weights `[n, k]`, each unpacked from its lane of its panel."""
    row = jnp.clip(indices.reshape(-1), 0, packed.kept[0] - 1)
    scale = packed.arrays.tensor_scale
    # A batch of panels, each a matrix of its own.
    panels = Panels(
        bytes=packed.arrays.bytes[row // PANEL_ROWS, None],
        tensor_scale=None if scale is None else jnp.broadcast_to(scale, row.shape),
    )
    matrices = unpack(dataclasses.replace(packed, arrays=panels, kept=(PANEL_ROWS,)))
    rows = jax.vmap(lambda matrix, lane: matrix[lane])(matrices, row % PANEL_ROWS)
    return rows.reshape(*indices.shape, packed.k[0])


PANELS = Layout(backend="cpu_ffi", batch=batch_of, unpack=unpack, take=take)


def rejects(call: PackCall) -> str | None:
    """Why weights cannot be packed here, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without packed weights; build it again"
    return (
        rejections.rejects_format(call.format)
        or call.rejects_layout()
        or rejects_scale_axes(call, batch=True)
    )


def pack(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects` lets through, in the kernels' order."""
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
        sizes=(("bytes", _panel_bytes(format, math.prod(k))),),
    )
    (panels,) = handler(axes.as_matrices(x.codes), axes.as_matrices(x.scales))
    tensor_scale = x.tensor_scale
    if tensor_scale is not None:
        # One for each matrix: scan slices every array of a stack along the same axes.
        tensor_scale = tensor_scale.reshape(tensor_scale.shape[: len(batch)])
        tensor_scale = jnp.broadcast_to(tensor_scale, batch)
    return PackedMXArray(
        arrays=Panels(bytes=panels, tensor_scale=tensor_scale),
        layout=PANELS,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=format,
        dtype=x.dtype,
    )


def _panel_bytes(format: BlockFormat, k: int) -> int:
    chunks = -(-k // _CHUNK)
    codes = chunks * _CHUNK * PANEL_ROWS // (2 if format.element.bits == 4 else 1)
    scales = chunks * (_CHUNK // rejections.block_size(format)) * PANEL_ROWS
    return codes + -(-scales // 64) * 64 + _SUMMARY
