"""Block-scaled operands as Blackwell's tensor cores read them, and which formats meet there."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import packing
from mx_jax.formats import (
    E2M1,
    E4M3,
    E4M3_SCALE,
    E5M2,
    E8M0,
    BlockFormat,
    ElementFormat,
    ScaleFormat,
)
from mx_jax.formats.element import known_element, known_scale
from mx_jax.mxarray import MXArray

# Scales lie in tiles of 128 rows and 4 columns, as the tensor cores read them.
SCALE_ROWS = 128
SCALE_COLUMNS = 4
# Elements that may meet, with the scales and blocks that they may have.
KINDS: tuple[tuple[tuple[ElementFormat, ...], tuple[tuple[ScaleFormat, int], ...]], ...] = (
    ((E4M3, E5M2), ((E8M0, 32),)),
    ((E2M1,), ((E8M0, 32), (E8M0, 16), (E4M3_SCALE, 16))),
)
# What rows and k are padded to: a tile of scales, and 128 bytes of codes. A left operand of fewer
# rows than a tile brings codes for a multiple of 8 alone.
_PAD_ROWS = 128
_PAD_FEW = 8
PAD_K = 256


def meet(lhs: BlockFormat | None, rhs: BlockFormat | None) -> bool:
    """Whether the tensor cores multiply operands of two formats as they are."""
    if lhs is None or rhs is None or _kind(lhs) is None:
        return False
    return _kind(lhs) == _kind(rhs) and (lhs.scale, lhs.block) == (rhs.scale, rhs.block)


def _kind(format: BlockFormat) -> int | None:
    """Which of `KINDS` a format belongs to."""
    kept, block = format.block
    element, scale = known_element(format.element), known_scale(format.scale)
    for index, (elements, scales) in enumerate(KINDS):
        if kept == 1 and element in elements and (scale, block) in scales:
            return index
    return None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("shape", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScaledOperand:
    """A batch of rows `[batch, rows, k]` as Blackwell's tensor cores read them.

    Padded with zeros to multiples of 128 rows and 256 of k, `rows'` and `k'`; a left operand of
    fewer than 128 rows has codes for a multiple of 8. Everything is bytes: what kernels take as FP4
    or FP8 is the same memory under another name.

    Attributes:
      codes: uint8 `[batch * rows', bytes of k' codes]`; of two FP4 codes the first lies in the low
        half of a byte.
      scales: uint8 `[batch * rows' / 128, k' / (4 * block), 32, 16]`: of a tile of 128 rows and 4
        columns, row `32 i + j` lies at `[j, 4 i]` to `[j, 4 i + 3]`.
      tensor_scale: float32 scalar, or `[batch, 1, 1]`, or None.
      shape: `(batch, rows, k)`.
      format: the block format.
      dtype: the dtype that was quantized.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    shape: tuple[int, int, int]
    format: BlockFormat
    dtype: np.dtype

    @classmethod
    def of(cls, x: MXArray, *, left: bool = False) -> "ScaledOperand":
        """An MXArray `[batch, rows, k]`, with blocks along k, in this layout.

        Args:
          x: to be laid out.
          left: whether as a left operand, of which few rows are read as they are.
        """
        batch, rows, k = x.shape
        block = x.format.block[1]
        assert isinstance(block, int)
        padded_rows, padded_k = rows + -rows % _PAD_ROWS, k + -k % PAD_K
        unit = _PAD_FEW if left and rows < _PAD_ROWS else _PAD_ROWS
        codes = jnp.pad(x.codes, ((0, 0), (0, -rows % unit), (0, padded_k - k)))
        missing = padded_k // block - x.scales.shape[2]
        scales = jnp.pad(x.scales, ((0, 0), (0, padded_rows - rows), (0, missing)))
        tensor_scale = x.tensor_scale
        return cls(
            codes=packing.pack(codes.reshape(-1, padded_k), x.format.element.bits),
            scales=scale_tiles(scales.reshape(-1, scales.shape[2])),
            tensor_scale=_factor(tensor_scale),
            shape=(batch, rows, k),
            format=x.format,
            dtype=x.dtype,
        )

    @property
    def stacked(self) -> tuple[int, ...]:
        """Leading axes of a stack."""
        return self.codes.shape[:-2]

    def merged(self) -> "ScaledOperand":
        """A stack as one batch, which is what kernels take."""
        if not self.stacked:
            return self
        return dataclasses.replace(
            self,
            codes=self.codes.reshape(-1, *self.codes.shape[-1:]),
            scales=self.scales.reshape(-1, *self.scales.shape[-3:]),
            tensor_scale=None if self.tensor_scale is None else self.tensor_scale.reshape(-1, 1, 1),
            shape=(math.prod(self.stacked), *self.shape[1:]),
        )

    @property
    def padded_k(self) -> int:
        """Contracted length, padded."""
        return self.codes.shape[1] * 8 // self.format.element.bits

    @property
    def elements(self) -> jax.Array:
        """The codes in the element's own dtype: `[batch * rows', k']`."""
        native = lax.bitcast_convert_type(self.codes, self.format.element.dtype)
        return native.reshape(-1, self.padded_k)

    @property
    def scale_values(self) -> jax.Array:
        """The scales in their own dtype."""
        return lax.bitcast_convert_type(self.scales, self.format.scale.dtype)

    def unpack(self) -> MXArray:
        """The operand as an MXArray `[batch, rows, k]` with blocks along k."""
        batch, rows, k = self.shape
        block = self.format.block[1]
        assert isinstance(block, int)
        codes = packing.unpack(self.codes, self.format.element.bits, self.padded_k)
        tiles = self.scales.reshape(*self.scales.shape[:2], 32, 4, SCALE_COLUMNS)
        scales = tiles.transpose(0, 3, 2, 1, 4).reshape(batch, -1, self.padded_k // block)
        tensor_scale = self.tensor_scale
        return MXArray(
            codes=codes.reshape(batch, -1, self.padded_k)[:, :rows, :k],
            scales=scales[:, :rows, : -(-k // block)],
            tensor_scale=None if tensor_scale is None else tensor_scale.reshape(-1, 1, 1),
            format=self.format,
            blocks=((-1, block),),
            dtype=self.dtype,
        )


def scale_tiles(scales: jax.Array) -> jax.Array:
    """Scales `[rows, columns]` in tiles of 128 rows and 4 columns, `[tiles, tiles, 32, 16]`."""
    along = scales.shape[0] // SCALE_ROWS, scales.shape[1] // SCALE_COLUMNS
    tiles = scales.reshape(along[0], 4, 32, along[1], SCALE_COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(*along, 32, 16)


def _factor(tensor_scale: jax.Array | None) -> jax.Array | None:
    if tensor_scale is None:
        return None
    return tensor_scale.reshape(() if tensor_scale.size == 1 else (-1, 1, 1))
