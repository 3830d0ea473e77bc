"""Rows of codes at their format's width, as a key-value cache holds them."""

import dataclasses
import functools

import jax
import numpy as np

from mx_jax.codecs import packing
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("format", "features", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """`[matrices, length, features]` with blocks along the features, each row packed by itself.

    Attributes:
      codes: uint8 `[matrices, length, bytes of a row]`, as `mx_jax.codecs.packing` packs them.
      scales: `[matrices, length, blocks of a row]`.
      tensor_scale: float32 `[1, 1, 1]`, or `[matrices, length, 1]`, one for each row; None where
        the format has none.
      format: the block format.
      features: values of a row.
      dtype: of the values.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None
    format: BlockFormat
    features: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return (*self.codes.shape[:-1], self.features)

    def unpacked(self) -> MXArray:
        """The same rows, one code a byte."""
        return MXArray(
            codes=packing.unpack(self.codes, self.format.element.bits, self.features),
            scales=self.scales,
            tensor_scale=self.tensor_scale,
            format=self.format,
            blocks=((-1, self.format.block[1]),),
            dtype=self.dtype,
        )


# Of keys or values.
Rows = jax.Array | PackedRows
