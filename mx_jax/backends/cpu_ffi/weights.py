"""Weights packed once, ahead of time, in the order in which the CPU's kernels read them.

A product of few rows, as in decoding, is bound by reading its weights. Packed, FP4 takes half a
byte a code, and every instruction set reads it in one stream.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from mx_jax.backends.base import Operand
from mx_jax.backends.cpu_ffi import library, matmul
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

PACK_TARGET = "mx_jax_cpu_pack_weights"
MATMUL_TARGET = "mx_jax_cpu_matmul_packed"

_ROWS = 32  # of a panel
_CHUNK = 32  # along k
_SUMMARY = 64  # bytes at the end of a panel; all as in custom_calls/cpu/weights.h


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("panels", "tensor_scale"),
    meta_fields=("shape", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """Codes and scales of a weight `[n, k]`, panel by panel; `unpack` gives the MXArray again.

    Attributes:
      panels: uint8 `[ceil(n / 32), bytes of a panel]`.
      tensor_scale: float32 scalar (NVFP4), else None.
      shape: `(n, k)`.
      format: the block format; blocks lie along k.
      dtype: the dtype that was quantized.
    """

    panels: jax.Array
    tensor_scale: jax.Array | None
    shape: tuple[int, int]
    format: BlockFormat
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return int(np.prod(self.panels.shape))

    def unpack(self) -> MXArray:
        """The weight as an MXArray `[n, k]`; blocks of zeros have scale 1."""
        rows, k = self.shape
        per_word = 8 if self.format.element.bits == 4 else 4
        block = matmul.block_size(self.format)
        chunks, blocks = -(-k // _CHUNK), -(-k // _CHUNK) * (_CHUNK // block)
        num_panels = self.panels.shape[0]
        code_bytes = chunks * _CHUNK * _ROWS * 4 // per_word
        words = self.panels[:, :code_bytes].reshape(num_panels, -1, _ROWS, 4)
        if per_word == 8:
            words = jnp.concatenate([words & 15, words >> 4], axis=-1)
        codes = words.transpose(0, 2, 1, 3).reshape(num_panels * _ROWS, chunks * _CHUNK)
        scales = self.panels[:, code_bytes : code_bytes + blocks * _ROWS]
        scales = scales.reshape(num_panels, blocks, _ROWS).transpose(0, 2, 1)
        scales = scales.reshape(num_panels * _ROWS, blocks)
        shape = scales_shape(self.shape, ((-1, block),))
        tensor_scale = self.tensor_scale
        return MXArray(
            codes=codes[:rows, :k],
            scales=scales[: shape[0], : shape[1]],
            tensor_scale=None if tensor_scale is None else tensor_scale.reshape(1, 1),
            format=self.format,
            blocks=((-1, block),),
            dtype=self.dtype,
        )


def rejects(weights: MXArray) -> str | None:
    """Why a weight cannot be packed here, or None."""
    loaded = library.load()
    if isinstance(loaded, str):
        return loaded
    if PACK_TARGET not in loaded.targets:
        return "was built without packed weights; build it again"
    if weights.ndim != 2 or len(weights.blocks) != 1:
        return f"packs [n, k] or [k, n] with blocks along k, got {weights.shape}, {weights.blocks}"
    return matmul.rejects_format(weights.format)


def pack_weights(weights: MXArray) -> PackedWeights:
    """Pack a weight once, for any number of products.

    Args:
      weights: `[n, k]` or `[k, n]`, with blocks along k.

    Returns:
      The same codes and scales, in the kernels' order.

    Raises:
      ValueError: where the library is missing, or takes no such weights; the message says why.
    """
    reason = rejects(weights)
    if reason is not None:
        raise ValueError(f"pack_weights: the cpu_ffi backend {reason}")
    ((axis, block),) = weights.blocks
    assert isinstance(block, int), weights.blocks
    k_first = axis % 2 == 0
    rows, k = weights.shape[::-1] if k_first else weights.shape
    format = weights.format.with_block(block)
    result = jax.ShapeDtypeStruct(_panels_shape(format, rows, k), jnp.uint8)
    panels = jax.ffi.ffi_call(PACK_TARGET, result, vmap_method="sequential")(
        weights.codes,
        weights.scales,
        element=format.element.name,
        scale=format.scale.name,
        block=np.int32(block),
        k_first=k_first,
    )
    scale = weights.tensor_scale
    return PackedWeights(
        panels=panels,
        tensor_scale=None if scale is None else scale.reshape(()),
        shape=(rows, k),
        format=format,
        dtype=weights.dtype,
    )


def _panels_shape(format: BlockFormat, rows: int, k: int) -> tuple[int, int]:
    chunks = -(-k // _CHUNK)
    codes = chunks * _CHUNK * _ROWS // (2 if format.element.bits == 4 else 1)
    scales = chunks * (_CHUNK // matmul.block_size(format)) * _ROWS
    return -(-rows // _ROWS), codes + -(-scales // 64) * 64 + _SUMMARY


def packed_matmul(
    lhs: Operand, weights: PackedWeights, out_dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """`lhs[*batch, m, k]` by packed `weights[n, k]`: `[*batch, m, n]`.

    Args:
      lhs: float32, bfloat16 or float16; or an MXArray with the weights' block size along k.
      weights: what `pack_weights` gave.
      out_dtype: float32, bfloat16 or float16.

    Returns:
      The bits that the product of unpacked operands has.

    Raises:
      ValueError: contracted sizes or blocks that differ.
    """
    block = matmul.block_size(weights.format)
    quantized = isinstance(lhs, MXArray)
    if lhs.ndim < 2 or lhs.shape[-1] != weights.shape[1]:
        raise ValueError(
            "packed_matmul: lhs must be [*batch, m, k] with the weights' k, got "
            f"lhs.shape={lhs.shape}, weights.shape={weights.shape}"
        )
    if quantized and lhs.blocks != ((-1, block),):
        raise ValueError(
            f"packed_matmul: lhs must have blocks of {block} along its last axis, got "
            f"lhs.blocks={lhs.blocks}"
        )
    elements, scales = matmul.arrays(lhs, lhs.ndim - 1)
    alpha = jnp.ones((), jnp.float32)
    for scale in (weights.tensor_scale, lhs.tensor_scale if quantized else None):
        alpha = alpha if scale is None else alpha * scale.reshape(())
    attributes = {
        "lhs_element": lhs.format.element.name if quantized else "none",
        "lhs_scale": lhs.format.scale.name if quantized else "none",
        "rhs_element": weights.format.element.name,
        "rhs_scale": weights.format.scale.name,
        "block": np.int32(block),
        "lhs_k_first": False,
    }
    call = _product(weights.shape[0], np.dtype(out_dtype), tuple(attributes.items()))
    return call(elements, scales, weights.panels, alpha)


@functools.lru_cache(maxsize=1024)
def _product(columns: int, out_dtype: np.dtype, attributes: tuple[tuple[str, Any], ...]) -> Any:
    """The handler's call, where a batch of left operands is one call too."""

    def call(lhs, scales, panels, alpha):
        result = jax.ShapeDtypeStruct((*lhs.shape[:-1], columns), out_dtype)
        function = jax.ffi.ffi_call(MATMUL_TARGET, result, vmap_method="sequential")
        return function(lhs, scales, panels, alpha, **dict(attributes))

    product: Any = custom_vmap(call)

    @product.def_vmap
    def _(size, in_batched, lhs, scales, panels, alpha):
        if not in_batched[2] and not in_batched[3] and in_batched[0]:
            quantized = scales.shape != (0,)
            if quantized and not in_batched[1]:
                scales = jnp.broadcast_to(scales, (size, *scales.shape))
            return product(lhs, scales, panels, alpha), True
        axes = [0 if batched else None for batched in in_batched]
        return jax.vmap(call, in_axes=axes)(lhs, scales, panels, alpha), True

    return product
