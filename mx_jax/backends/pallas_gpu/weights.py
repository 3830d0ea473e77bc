"""Weights in the order in which the kernel reads them, packed once for any number of products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# What one scale covers.
BLOCK = 32
# FP4 packs two blocks into the bytes of one.
PAIR = 2 * BLOCK
# Rows that one warpgroup multiplies.
ROWS = 64
# What n and k are padded to: two warpgroups' rows, and a step of the pipeline.
PAD_N = 128
PAD_K = 128


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales"),
    meta_fields=("shape", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """A batch of weights `[batch, n, k]` in the kernel's layout; `unpack` gives them back.

    Padded to multiples of 128 with zeros under a scale of one. With `n'` and `k'` padded:

      - one byte a code: `codes[b, row, column]` is the code itself, `[batch, n', k']`;
      - FP4: byte `32 g + j` of a row holds code `64 g + j` in its low and code `64 g + 32 + j` in
        its high nibble, `[batch, n', k' / 2]`. So a thread that loads a byte has the same column
        of two neighbouring blocks, and unpacking moves nothing between threads;
      - `scales[b, block, row]`, `[batch, k' / 32, n']`: the scales of one block of many rows lie
        together, as the kernel reads them.

    Attributes:
      codes: uint8.
      scales: uint8, E8M0.
      shape: `(batch, n, k)`.
      format: the block format, with blocks of 32 along k.
      dtype: the dtype that was quantized.
    """

    codes: jax.Array
    scales: jax.Array
    shape: tuple[int, int, int]
    format: BlockFormat
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return int(np.prod(self.codes.shape) + np.prod(self.scales.shape))

    def unpack(self) -> MXArray:
        """The weights as an MXArray `[batch, n, k]` with blocks along k."""
        batch, n, k = self.shape
        codes, padded = self.codes, self.codes.shape[1]
        if self.format.element.bits == 4:
            pairs = codes.reshape(batch, padded, -1, 1, BLOCK)
            codes = jnp.concatenate([pairs & 0xF, pairs >> 4], axis=3).reshape(batch, padded, -1)
        blocks: Blocks = ((-1, BLOCK),)
        return MXArray(
            codes=codes[:, :n, :k],
            scales=self.scales.swapaxes(1, 2)[:, :n, : -(-k // BLOCK)],
            format=self.format,
            blocks=blocks,
            dtype=self.dtype,
        )


def pack(codes: jax.Array, scales: jax.Array, format: BlockFormat, dtype: np.dtype):
    """Codes and scales of weights `[batch, n, k]` in the kernel's layout.

    Args:
      codes: uint8 `[batch, n, k]`, one code a byte.
      scales: uint8 `[batch, n, ceil(k / 32)]`, E8M0.
      format: the block format.
      dtype: the dtype that was quantized.

    Returns:
      PackedWeights.
    """
    batch, n, k = codes.shape
    extra_n, extra_k = -n % PAD_N, -k % PAD_K
    num_blocks = (k + extra_k) // BLOCK
    codes = jnp.pad(codes, ((0, 0), (0, extra_n), (0, extra_k)))
    padding = ((0, 0), (0, extra_n), (0, num_blocks - scales.shape[2]))
    scales = jnp.pad(scales, padding, constant_values=127)
    if format.element.bits == 4:
        pairs = codes.reshape(batch, n + extra_n, -1, 2, BLOCK)
        codes = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(batch, n + extra_n, -1)
    return PackedWeights(
        codes=codes,
        scales=scales.swapaxes(1, 2),
        shape=(batch, n, k),
        format=format,
        dtype=dtype,
    )
