"""Panels: weights in the order in which the CPU's kernels read them, 32 rows with all of k each."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from mx_jax.backends.cpu_ffi import rejections
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

PANEL_ROWS = 32
CHUNK = 32  # along k
RECORD = 2  # chunks whose scales lie together, before their codes
SUMMARY = 64  # bytes at the front of a panel; all as in custom_calls/products/weights.h


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
    batch, num_panels, records = panels.shape[:-2], panels.shape[-2], _records(k)
    block, padded = rejections.block_size(packed.format), num_panels * PANEL_ROWS
    num_scales, num_codes = _record_bytes(packed.format)
    split = panels[..., SUMMARY:].reshape(*batch, num_panels, records, num_scales + num_codes)
    words = split[..., num_scales:].reshape(*batch, num_panels, -1, PANEL_ROWS, 4)
    words = _codes_of(words, packed.format.element.bits)
    codes = jnp.swapaxes(words, -3, -2).reshape(*batch, padded, records * RECORD * CHUNK)
    scales = split[..., :num_scales].reshape(*batch, num_panels, -1, PANEL_ROWS)
    scales = jnp.swapaxes(scales, -2, -1).reshape(*batch, padded, records * RECORD * CHUNK // block)
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


def panel_bytes(format: BlockFormat, k: int) -> int:
    """Bytes of one panel, of k contracted positions."""
    return SUMMARY + _records(k) * sum(_record_bytes(format))


def _records(k: int) -> int:
    """Records of a panel."""
    return -(-k // (RECORD * CHUNK))


def _record_bytes(format: BlockFormat) -> tuple[int, int]:
    """Bytes of a record's scales, and of its codes."""
    scales = RECORD * CHUNK // rejections.block_size(format) * PANEL_ROWS
    return scales, RECORD * CHUNK * PANEL_ROWS * format.element.bits // 8


def _codes_of(words: jax.Array, bits: int) -> jax.Array:
    """Codes `[..., words along k, rows, 4 or 8]` of words `[..., words in memory, rows, 4]`."""
    if bits == 4:
        return jnp.concatenate([words & 15, words >> 4], axis=-1)
    if bits == 6:
        # Three words hold four: bits 6 and 7 of each are two bits of the last.
        threes = words.reshape(*words.shape[:-3], -1, 3, *words.shape[-2:])
        first, second, third = (threes[..., i, :, :] >> 6 for i in range(3))
        last = first | second << 2 | third << 4
        fours = jnp.concatenate([threes & 63, last[..., None, :, :]], axis=-3)
        return fours.reshape(*words.shape[:-3], -1, *words.shape[-2:])
    return words
