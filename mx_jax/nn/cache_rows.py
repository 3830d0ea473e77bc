"""Rows of keys or of values, each quantized when it is written and never touched again."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import packing
from mx_jax.codecs.explicit_axes import reshape_along
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import dequantize, quantize_operand
from mx_jax.packed import PackedRows, Rows
from mx_jax.recipes.measured import measured_operand


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("format", "features", "dtype", "scale_is_fixed"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheRows:
    """Rows of keys or of values, each with its blocks along the features.

    A row is quantized when it is written, and never touched again: what is written later changes
    neither its codes nor its scales. Batch and heads are one axis, as products of matrices take
    them: where XLA has to merge them it writes a row twice, and copies the whole cache for each.

    Attributes:
      codes: uint8 `[batch * heads, length, bytes of a row]`, FP4 two codes a byte; without a
        format the values themselves.
      scales: `[batch * heads, length, blocks of a row]`, or None.
      tensor_scale: float32 `[1, 1, 1]`, fixed, or `[batch * heads, length, 1]`, one for each
        token and head; None where the format has none.
      format: the block format, or None.
      features: values of a row.
      dtype: what `read` gives.
      scale_is_fixed: whether the tensor scale is one for all rows: with one row its shape does not
        say so.
    """

    codes: jax.Array
    scales: jax.Array | None
    tensor_scale: jax.Array | None
    format: BlockFormat | None
    features: int
    dtype: np.dtype
    scale_is_fixed: bool = False

    def write(self, rows: jax.Array, position: jax.typing.ArrayLike) -> "CacheRows":
        """The same with `rows`, `[batch * heads, tokens, features]`, from a position on: one for
        all, or `[batch * heads]`."""
        matrices, length, _ = self.codes.shape
        given, tokens, features = rows.shape
        # What is smaller would be written into a part, and the rest be read as it was.
        if (given, features) != (matrices, self.features) or tokens > length:
            raise ValueError(
                "KVCache: keys and values must have the cache's batch, heads and features, and no "
                f"more tokens than it holds, got batch * heads={given}, tokens={tokens}, features="
                f"{features}; the cache has {matrices}, {length} and {self.features}"
            )
        if self.format is None:
            return dataclasses.replace(
                self, codes=_put(self.codes, rows.astype(self.dtype), position)
            )
        scale = self.tensor_scale
        each = scale is not None and not self.scale_is_fixed
        new = _quantize(rows, self.format, scale, each)
        if scale is not None and new.tensor_scale is not None and each:
            scale = _put(scale, new.tensor_scale, position)
        assert self.scales is not None
        return dataclasses.replace(
            self,
            codes=_put(self.codes, packing.pack(new.codes, self.format.element.bits), position),
            scales=_put(self.scales, new.scales, position),
            tensor_scale=scale,
        )

    def held(self, length: int | None = None) -> Rows:
        """The first rows as they are held, all of them without a length."""
        codes = self.codes[:, :length]
        if self.format is None:
            return codes
        assert self.scales is not None
        tensor_scale = self.tensor_scale
        if tensor_scale is not None and not self.scale_is_fixed:
            tensor_scale = tensor_scale[:, :length]
        return PackedRows(
            codes=codes,
            scales=self.scales[:, :length],
            tensor_scale=tensor_scale,
            format=self.format,
            features=self.features,
            dtype=self.dtype,
        )

    def read(self, length: int | None = None) -> jax.Array:
        """The values of the first rows, `[batch * heads, length, features]`."""
        rows = self.held(length)
        return dequantize(rows.unpacked()) if isinstance(rows, PackedRows) else rows


def _put(whole: jax.Array, rows: jax.Array, position: jax.typing.ArrayLike) -> jax.Array:
    if jnp.ndim(position) == 0:
        return lax.dynamic_update_slice_in_dim(whole, rows, position, 1)
    return jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))(
        whole, rows, jnp.asarray(position)
    )


@jax.custom_jvp
def _no_gradient(rows: jax.Array) -> jax.Array:
    """Rows that become codes, which pass no gradient: zero would be taken for one."""
    return rows


@_no_gradient.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "KVCache: rows that are kept as codes pass no gradient, got a derivative by keys or values "
        f"of shape={primals[0].shape}; take it through all tokens at once (decode=False), keep the "
        "cache without a format, or write lax.stop_gradient around what is appended"
    )


def _quantize(
    rows: jax.Array, format: BlockFormat, tensor_scale: jax.Array | None, each: bool
) -> MXArray:
    """Blocks along the last axis; with `each`, every row is a tensor of its own."""
    spec, blocks = measured_operand(format), ((-1, format.block[1]),)
    rows = _no_gradient(rows)
    if not each:
        return quantize_operand(rows, spec, blocks, None, tensor_scale)
    matrices, tokens, features = rows.shape
    flat = reshape_along(rows, (matrices * tokens, features), rows)
    quantized = jax.vmap(lambda row: quantize_operand(row, spec, blocks))(flat)
    return jax.tree.map(
        lambda part: reshape_along(part, (matrices, tokens, part.size // len(flat)), rows),
        quantized,
    )


def empty_rows(
    shape: tuple[int, ...], form: BlockFormat | None, dtype: np.dtype, tensor_scale: float | None
) -> CacheRows:
    """Rows `[batch * heads, length, features]` with nothing in them."""
    *rows, features = shape
    if form is None:
        codes, scales, own = jnp.zeros(shape, dtype), None, None
    else:
        size = form.block[1]
        assert isinstance(size, int)
        width = packing.packed_length(features, form.element.bits)
        codes = jnp.zeros((*rows, width), jnp.uint8)
        scales = jnp.zeros((*rows, -(-features // size)), form.scale.storage_dtype)
        own = None
        if tensor_scale is not None:
            own = jnp.full((1, 1, 1), tensor_scale, jnp.float32)
        elif form.tensor_scale:
            own = jnp.ones((*rows, 1), jnp.float32)
    return CacheRows(
        codes=codes,
        scales=scales,
        tensor_scale=own,
        format=form,
        features=features,
        dtype=dtype,
        scale_is_fixed=tensor_scale is not None,
    )
