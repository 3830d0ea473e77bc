"""A key-value cache at its format's real width, and causal attention over it.

Heads of keys and values may be shared by several of queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mx_jax.codecs import explicit_axes, packing
from mx_jax.codecs.straight_through import refuse_derivative
from mx_jax.formats import WHOLE, BlockFormat, block_format
from mx_jax.formats.block import FormatLike
from mx_jax.ops.product import cast_array
from mx_jax.ops.quantize import attend_matrices, dequantize
from mx_jax.packed import PackedRows, Rows
from mx_jax.recipes.base import measured_operand


def _written(
    held: Rows, rows: jax.Array, position: jax.typing.ArrayLike, scale_is_fixed: bool
) -> Rows:
    """`held` with `rows`, `[batch, tokens, heads, features]`, from a position on: one for all, or
    `[batch]`."""
    codes = held.codes if isinstance(held, PackedRows) else held
    batch, heads, length, features = held.shape
    sequences, tokens, row_heads, row_features = rows.shape
    # What is smaller would be written into a part, and the rest be read as it was.
    if (sequences, row_heads, row_features) != (batch, heads, features) or tokens > length:
        raise ValueError(
            "KVCache: keys and values must have the cache's batch, heads and features, and no "
            f"more tokens than it holds, got batch={sequences}, tokens={tokens}, "
            f"heads={row_heads}, features={row_features}; the cache has {batch}, {length}, "
            f"{heads} and {features}"
        )
    rows = rows.swapaxes(1, 2)
    if (sharding := explicit_axes.explicit_sharding(codes)) is not None:
        place = [*explicit_axes.partitions(sharding, 4)[:2], None, None]
        rows = jax.sharding.reshard(rows, explicit_axes.with_partitions(sharding, place))
    position = along_sequences(position, codes)
    if not isinstance(held, PackedRows):
        return _put(held, rows.astype(held.dtype), position)
    # Codes pass no gradient: zero would be taken for one.
    rows, scale = refuse_derivative(rows, _refuse), held.tensor_scale
    spec, blocks = measured_operand(held.format), ((-1, held.format.block[1]),)
    if scale is None or scale_is_fixed:
        new = cast_array(rows, spec, blocks, None, scale)
    else:
        # Every row is a tensor of its own.
        of_row = lambda row: cast_array(row, spec, blocks)  # noqa: E731
        new = jax.vmap(jax.vmap(jax.vmap(of_row)))(rows)
        assert new.tensor_scale is not None
        scale = _put(scale, new.tensor_scale, position)
    return dataclasses.replace(
        held,
        codes=_put(codes, packing.pack(new.codes, held.format.element.bits), position),
        scales=_put(held.scales, new.scales, position),
        tensor_scale=scale,
    )


def read_rows(rows: Rows) -> jax.Array:
    """The values of keys or values, `[batch, heads, length, features]`."""
    return dequantize(rows.unpacked()) if isinstance(rows, PackedRows) else rows


def _put(whole: jax.Array, rows: jax.Array, position: jax.typing.ArrayLike) -> jax.Array:
    """Rows written into all of them from a position on, in place where the whole is donated."""
    if jnp.ndim(position) == 0:
        return lax.dynamic_update_slice_in_dim(whole, rows, position, 2)
    return jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=1))(
        whole, rows, jnp.asarray(position)
    )


def _refuse(rows: jax.Array) -> None:
    raise ValueError(
        "KVCache: rows that are kept as codes pass no gradient, got a derivative by keys or values "
        f"of shape={rows.shape}; take it through all tokens at once (decode=False), keep the "
        "cache without a format, or write lax.stop_gradient around what is appended"
    )


def _empty_rows(
    shape: tuple[int, ...], form: BlockFormat | None, dtype: np.dtype, tensor_scale: float | None
) -> Rows:
    """Rows `[batch, heads, length, features]` with nothing in them."""
    if form is None:
        return jnp.zeros(shape, dtype)
    *rows, features = shape
    size, scale = form.block[1], None
    assert isinstance(size, int)
    if tensor_scale is not None:
        scale = jnp.full((1, 1, 1, 1), tensor_scale, jnp.float32)
    elif form.tensor_scale:
        scale = jnp.ones((*rows, 1), jnp.float32)
    width = packing.packed_length(features, form.element.bits)
    return PackedRows(
        codes=jnp.zeros((*rows, width), jnp.uint8),
        scales=jnp.zeros((*rows, -(-features // size)), form.scale.storage_dtype),
        tensor_scale=scale,
        format=form,
        features=features,
        dtype=dtype,
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys", "values"),
    meta_fields=("scales_are_fixed",),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """Keys and values of the tokens so far, in a block format or as they are.

    A pytree: pass it through `jit`, donated, and it is written in place. A token's keys and values
    are quantized once, in blocks along the features of a head, and never touched again: what is
    written later changes neither its codes nor its scales. Heads come before tokens, as attention
    reads them; devices may share sequences, heads, or both.

    Attributes:
      keys: rows of keys, `[batch, heads, length, features]`: an array, or codes and scales, with a
        tensor scale `[1, 1, 1, 1]`, fixed, or `[batch, heads, length, 1]`.
      values: rows of values, likewise.
      scales_are_fixed: whether tensor scales are one for all rows: with one row their shape does
        not say so.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> cache = mx_jax.nn.KVCache.zeros(1, 128, 2, 64, format="mxfp4")
      >>> cache.nbytes  # in float32 131072
      17408
      >>> new = jax.random.normal(jax.random.key(0), (3, 1, 1, 2, 64))
      >>> step = jax.jit(lambda cache, q, k, v, at: cache.append(k, v, at).attend(q, at))
      >>> step(cache, *new, 0).shape
      (1, 1, 2, 64)
    """

    keys: Rows
    values: Rows
    scales_are_fixed: bool = False

    @classmethod
    def zeros(
        cls,
        batch: int,
        length: int,
        heads: int,
        features: int,
        *,
        format: FormatLike | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        tensor_scales: tuple[float, float] | None = None,
    ) -> "KVCache":
        """An empty cache.

        Args:
          batch: number of sequences.
          length: most tokens that it holds.
          heads: heads of keys and values.
          features: of a head.
          format: a block format or its name; None keeps values as they are, in `dtype`.
          dtype: of what it holds without a format, and of what attention computes with.
          tensor_scales: of keys and of values, for formats with one (NVFP4): fixed, as found by
            calibration, `amax / 2688`. None: one for each token and head, four bytes more each.

        Raises:
          ValueError: a size of zero; a format whose blocks span tokens; tensor scales for a format
            without, or not finite and positive.
        """
        if min(batch, length, heads, features) < 1:
            raise ValueError(
                "KVCache: needs at least one sequence, token, head and feature, got "
                f"batch={batch}, length={length}, heads={heads}, features={features}"
            )
        form = None if format is None else block_format(format)
        # Blocks may not span tokens.
        if form and (form.block[0] != 1 or (form.block[1] is WHOLE and form.scale.is_float32)):
            raise ValueError(
                "KVCache: blocks must lie along the features of one token, got "
                f"format={form.name} with block={form.block}; use e.g. 'mxfp8_e4m3'"
            )
        check_tensor_scales(tensor_scales, form)
        shape = (batch, heads, length, features)
        keys, values = (
            _empty_rows(shape, form, np.dtype(dtype), scale)
            for scale in tensor_scales or (None, None)
        )
        return cls(keys=keys, values=values, scales_are_fixed=tensor_scales is not None)

    @property
    def length(self) -> int:
        """Most tokens that it holds."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def append(
        self, keys: jax.Array, values: jax.Array, position: jax.typing.ArrayLike
    ) -> "KVCache":
        """The cache with more tokens; rows of others stay as they are, bit for bit.

        Args:
          keys: `[batch, tokens, heads, features]`.
          values: likewise.
          position: of the first token, one for all sequences or int `[batch]`, which may be traced;
            like `lax.dynamic_update_slice`, a position too far back for the tokens to fit is moved.

        Raises:
          ValueError: a derivative by what becomes codes; a position that is negative, no integer,
            or of another shape; not four axes, another batch, other heads or features, or more
            tokens than the cache holds.
        """
        needs_four_axes("KVCache", keys=keys, values=values)
        position = checked_position(position, len(keys))
        options: Any = {"position": position, "scale_is_fixed": self.scales_are_fixed}
        return dataclasses.replace(
            self,
            keys=_written(self.keys, keys, **options),
            values=_written(self.values, values, **options),
        )

    def attend(self, query: jax.Array, position: jax.typing.ArrayLike) -> jax.Array:
        """Causal attention of queries over what the cache holds.

        A backend that reads codes reads no more of them than the tokens so far; for any other they
        are decoded first.

        `softmax(q k^T / sqrt(features)) v`, query `i` over the tokens up to `position + i`.

        Args:
          query: `[batch, tokens, query heads, features]`; a head of the cache serves as many
            query heads as there are for each.
          position: of the first query, one for all sequences or int `[batch]`.

        Returns:
          `[batch, tokens, query heads, features]`, of the query's dtype.

        Raises:
          ValueError: a query of another shape, or of whole numbers; a position that is negative, no
            integer, or of another shape.
        """
        needs_four_axes("KVCache", query=query)
        position = checked_position(position, len(query))
        return attend(query, self.keys, self.values, position)


def check_tensor_scales(scales: tuple[float, float] | None, form: BlockFormat | None) -> None:
    """Raise ValueError for fixed tensor scales that a cache in a format cannot have."""
    if scales is None:
        return
    if form is None or not form.tensor_scale:
        raise ValueError(
            "KVCache: tensor_scales are for formats with a tensor scale, got "
            f"tensor_scales={scales}, format={form and form.name}; leave them out"
        )
    if len(scales) != 2 or not all(0 < scale < float("inf") for scale in scales):
        raise ValueError(
            "KVCache: needs a finite and positive tensor scale of the keys and one of the values, "
            f"got tensor_scales={scales}"
        )


# Attention ----------------------------------------------------------------------------------------


def needs_four_axes(operation: str, **arrays: jax.Array) -> None:
    """Raise ValueError for arrays that are not `[batch, tokens, heads, features]`."""
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(
                f"{operation}: needs {name} as [batch, tokens, heads, features], got "
                f"{name}.shape={x.shape}"
            )


def checked_position(position: jax.typing.ArrayLike, batch: int) -> jax.typing.ArrayLike:
    """A position for all sequences or each; ValueError for what is none, or known to be below 0."""
    if isinstance(position, (list, tuple)):
        position = np.asarray(position)
    shape = jnp.shape(position)
    if not jnp.issubdtype(jnp.result_type(position), jnp.integer) or shape not in ((), (batch,)):
        raise ValueError(
            "KVCache: position must be an integer, one for all sequences or one for each, got "
            f"dtype={jnp.result_type(position)}, shape={shape}, batch={batch}"
        )
    if not isinstance(position, Tracer) and np.asarray(position).min() < 0:
        raise ValueError(f"KVCache: positions count from 0, got position={position}")
    return jnp.asarray(position) if shape else position


def attend(query: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`, query `i` over the rows up to `position + i`.

    Args:
      query: `[batch, tokens, query heads, features]`.
      keys: `[batch, heads, length, features]`, as values or as codes; a head serves as many query
        heads as there are for each.
      values: likewise.
      position: row of the first query's own token, one for all or int `[batch]`.

    Returns:
      Like query.

    Raises:
      ValueError: a query without four axes, of other features, or of whole numbers; heads that do
        not divide the query's.
    """
    needs_four_axes("attend", query=query)
    batch, tokens, num_queries, features = query.shape
    sequences, heads, *_ = keys.shape
    if batch * num_queries == 0 or sequences != batch or num_queries % heads:
        raise ValueError(
            "attend: heads of keys must divide heads of queries, got "
            f"query.shape={query.shape}, keys.shape={keys.shape}"
        )
    if features != keys.shape[-1] or not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(
            "attend: queries must be floats with the features of the keys, got "
            f"query.shape={query.shape}, query.dtype={query.dtype}, keys.shape={keys.shape}"
        )
    if not tokens:
        return query
    # One token's heads are in the order that the keys' take them.
    shared = query if tokens == 1 else query.swapaxes(1, 2)
    place = keys.codes if isinstance(keys, PackedRows) else keys
    shape = (batch, heads, num_queries // heads * tokens, features)
    shared = explicit_axes.reshape_along(jnp.asarray(shared), shape, place, axes=2)
    rows, axes = zip(*map(_by_sequence, (keys, values)), strict=True)
    axes = 0, *axes, 0 if jnp.ndim(position) else None
    run: Any = jax.vmap(functools.partial(attend_matrices, tokens), axes)
    attended = run(shared, *jax.tree.map(jnp.asarray, rows), along_sequences(position, place))
    if tokens > 1:
        shape = (batch, num_queries, tokens, features)
        attended = explicit_axes.reshape_along(attended, shape, attended, axes=2).swapaxes(1, 2)
    else:
        attended = explicit_axes.reshape_along(attended, query.shape, attended)
    if (sharding := explicit_axes.explicit_sharding(query)) is not None:
        attended = jax.sharding.reshard(attended, sharding)
    return attended.astype(query.dtype)


def along_sequences(position: jax.typing.ArrayLike, place: jax.Array) -> jax.typing.ArrayLike:
    """A position for each sequence, on explicit axes sharded as the first axis of `place`; one
    position for all as it is."""
    sharding = explicit_axes.explicit_sharding(place)
    if sharding is None or not jnp.ndim(position):
        return position
    first, *_ = explicit_axes.partitions(sharding, place.ndim)
    return jax.sharding.reshard(
        jnp.asarray(position), explicit_axes.with_partitions(sharding, [first])
    )


def _by_sequence(rows: Rows) -> tuple[Rows, Any]:
    """Rows for a `vmap` over sequences, and its axes: a tensor scale for all sequences has none."""
    if not isinstance(rows, PackedRows):
        return rows, 0
    scale, axes = rows.tensor_scale, dict[str, Any](codes=0, scales=0, tensor_scale=0)
    if scale is not None and scale.shape[0] != rows.shape[0]:
        axes["tensor_scale"] = None
        rows = dataclasses.replace(rows, tensor_scale=scale[0])
    return rows, dataclasses.replace(rows, **axes)
