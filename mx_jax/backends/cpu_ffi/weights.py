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

from mx_jax.backends.base import PackCall
from mx_jax.backends.cpu_ffi import library, rejections
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.matrices import rejects_scale_axes
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

TARGET = "mx_jax_cpu_pack_weights"

PANEL_ROWS = 32
_CHUNK = 32  # along k
_SUMMARY = 64  # bytes at the end of a panel; all as in custom_calls/products/weights.h


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("panels", "tensor_scale"),
    meta_fields=("kept", "k", "k_first", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedWeights(PackedMXArray):
    """Weights `[*batch, *kept, *k]`, or `[*batch, *k, *kept]`, panel by panel.

    Attributes:
      panels: uint8 `[*batch, ceil(n / 32), bytes of a panel]`, with n the product of kept.
      tensor_scale: float32 `[*batch]` (NVFP4), else None.
      kept: sizes of the kept axes.
      k: sizes of the contracted axes; blocks lie along the last.
      k_first: whether the contracted axes precede the kept ones.
      format: the block format.
      dtype: the dtype that was quantized.
    """

    panels: jax.Array
    tensor_scale: jax.Array | None
    kept: tuple[int, ...]
    k: tuple[int, ...]
    k_first: bool
    format: BlockFormat
    dtype: np.dtype

    @property
    def backend(self) -> str:
        return "cpu_ffi"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.panels.shape[:-2], *self.matrix_axes(self.k))

    def serves(self, contracting: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        num_batch = self.panels.ndim - 2
        start = num_batch if self.k_first else num_batch + len(self.kept)
        axes = tuple(range(start, start + len(self.k)))
        return contracting == axes and batch == tuple(range(num_batch))

    def unpack(self) -> MXArray:
        rows, k = math.prod(self.kept), math.prod(self.k)
        per_word = 8 if self.format.element.bits == 4 else 4
        block = rejections.block_size(self.format)
        chunks, blocks = -(-k // _CHUNK), -(-k // _CHUNK) * (_CHUNK // block)
        batch, num_panels = self.panels.shape[:-2], self.panels.shape[-2]
        code_bytes = chunks * _CHUNK * PANEL_ROWS * 4 // per_word
        words = self.panels[..., :code_bytes].reshape(*batch, num_panels, -1, PANEL_ROWS, 4)
        if per_word == 8:
            words = jnp.concatenate([words & 15, words >> 4], axis=-1)
        padded_rows = num_panels * PANEL_ROWS
        codes = jnp.swapaxes(words, -3, -2).reshape(*batch, padded_rows, chunks * _CHUNK)
        scales = self.panels[..., code_bytes : code_bytes + blocks * PANEL_ROWS]
        scales = jnp.swapaxes(scales.reshape(*batch, num_panels, blocks, PANEL_ROWS), -2, -1)
        scales = scales.reshape(*batch, padded_rows, blocks)
        scale_k = (*self.k[:-1], -(-self.k[-1] // block))
        scale = self.tensor_scale
        return MXArray(
            codes=self.arrange(codes[..., :rows, :k], batch, self.k),
            scales=self.arrange(scales[..., :rows, : math.prod(scale_k)], batch, scale_k),
            tensor_scale=None if scale is None else scale.reshape(*scale.shape, *self._ones),
            format=self.format,
            blocks=self.blocks,
            dtype=self.dtype,
        )

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * (len(self.kept) + len(self.k))


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


def pack(x: MXArray, call: PackCall) -> PackedWeights:
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
    return PackedWeights(
        panels=panels,
        tensor_scale=tensor_scale,
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
