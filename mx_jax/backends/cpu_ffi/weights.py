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
from mx_jax.backends.cpu_ffi import library, matmul
from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

TARGET = "mx_jax_cpu_pack_weights"

_ROWS = 32  # of a panel
_CHUNK = 32  # along k
_SUMMARY = 64  # bytes at the end of a panel; all as in custom_calls/cpu/weights.h


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
      tensor_scale: float32 of as many axes as batch has (NVFP4), else None.
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
        matrix = self.k + self.kept if self.k_first else self.kept + self.k
        return (*self.panels.shape[:-2], *matrix)

    @property
    def blocks(self) -> Blocks:
        axis = -len(self.kept) - 1 if self.k_first else -1
        return ((axis, matmul.block_size(self.format)),)

    def serves(self, contracting: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        num_batch = self.panels.ndim - 2
        start = num_batch if self.k_first else num_batch + len(self.kept)
        axes = tuple(range(start, start + len(self.k)))
        return contracting == axes and batch == tuple(range(num_batch))

    def unpack(self) -> MXArray:
        rows, k = math.prod(self.kept), math.prod(self.k)
        per_word = 8 if self.format.element.bits == 4 else 4
        block = matmul.block_size(self.format)
        chunks, blocks = -(-k // _CHUNK), -(-k // _CHUNK) * (_CHUNK // block)
        batch, num_panels = self.panels.shape[:-2], self.panels.shape[-2]
        code_bytes = chunks * _CHUNK * _ROWS * 4 // per_word
        words = self.panels[..., :code_bytes].reshape(*batch, num_panels, -1, _ROWS, 4)
        if per_word == 8:
            words = jnp.concatenate([words & 15, words >> 4], axis=-1)
        codes = jnp.swapaxes(words, -3, -2).reshape(*batch, num_panels * _ROWS, chunks * _CHUNK)
        scales = self.panels[..., code_bytes : code_bytes + blocks * _ROWS]
        scales = jnp.swapaxes(scales.reshape(*batch, num_panels, blocks, _ROWS), -2, -1)
        scales = scales.reshape(*batch, num_panels * _ROWS, blocks)
        scale_k = (*self.k[:-1], -(-self.k[-1] // block))
        scale = self.tensor_scale
        return MXArray(
            codes=self._arrange(codes[..., :rows, :k], self.k),
            scales=self._arrange(scales[..., :rows, : math.prod(scale_k)], scale_k),
            tensor_scale=None if scale is None else scale.reshape(*scale.shape, *self._ones),
            format=self.format,
            blocks=self.blocks,
            dtype=self.dtype,
        )

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * (len(self.kept) + len(self.k))

    def _arrange(self, matrix: jax.Array, k: tuple[int, ...]) -> jax.Array:
        """`[*batch, n, k]` with its axes as they were."""
        batch = matrix.shape[:-2]
        if self.k_first:
            return jnp.swapaxes(matrix, -1, -2).reshape(*batch, *k, *self.kept)
        return matrix.reshape(*batch, *self.kept, *k)


def rejects(call: PackCall) -> str | None:
    """Why weights cannot be packed here, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without packed weights; build it again"
    reason = matmul.rejects_format(call.format)
    if reason is not None:
        return reason
    if len(call.blocks) != 1:
        return f"packs blocks along one axis, got blocks={call.blocks}"
    ((axis, block),) = call.blocks
    k = call.contracting
    if not call.kept or axis % len(call.shape) != k[-1]:
        return f"packs blocks along the last contracted axis, got {call}"
    if not call.k_first and (*call.kept, *k) != tuple(range(call.num_batch, len(call.shape))):
        return f"packs contracted axes before or after all kept ones, got {call}"
    assert isinstance(block, int), call
    if len(k) > 1 and call.shape[k[-1]] % block:
        return f"needs whole blocks along the last of several contracted axes, got {call}"
    return None


def pack(x: MXArray, call: PackCall) -> PackedWeights:
    """Weights that `rejects` lets through, in the kernels' order."""
    ((_, block),) = call.blocks
    assert isinstance(block, int), call.blocks
    format = call.format.with_block(block)
    kept = tuple(call.shape[axis] for axis in call.kept)
    k = tuple(call.shape[axis] for axis in call.contracting)
    batch, rows, columns = call.shape[: call.num_batch], math.prod(kept), math.prod(k)

    def matrices(array: jax.Array) -> jax.Array:
        sizes = (math.prod(array.shape[axis] for axis in g) for g in (call.kept, call.contracting))
        return array.reshape(*batch, *tuple(sizes)[:: -1 if call.k_first else 1])

    result = jax.ShapeDtypeStruct((*batch, *_panels_shape(format, rows, columns)), jnp.uint8)
    panels = jax.ffi.ffi_call(TARGET, result, vmap_method="broadcast_all")(
        matrices(x.codes),
        matrices(x.scales),
        element=format.element.name,
        scale=format.scale.name,
        block=np.int32(block),
        k_first=call.k_first,
    )
    scale = x.tensor_scale
    return PackedWeights(
        panels=panels,
        tensor_scale=None if scale is None else scale.reshape((1,) * call.num_batch),
        kept=kept,
        k=k,
        k_first=call.k_first,
        format=format,
        dtype=x.dtype,
    )


def _panels_shape(format: BlockFormat, rows: int, k: int) -> tuple[int, int]:
    chunks = -(-k // _CHUNK)
    codes = chunks * _CHUNK * _ROWS // (2 if format.element.bits == 4 else 1)
    scales = chunks * (_CHUNK // matmul.block_size(format)) * _ROWS
    return -(-rows // _ROWS), codes + -(-scales // 64) * 64 + _SUMMARY
