"""Causal attention whose heads of keys and values are shared by several of queries."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mx_jax.codecs import explicit_axes
from mx_jax.ops.attention import attend_matrices
from mx_jax.packed import PackedRows, Rows


def needs_four_axes(operation: str, **given: jax.Array) -> None:
    """Raise ValueError for arrays that are not `[batch, tokens, heads, features]`."""
    for name, x in given.items():
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
    if not isinstance(position, Tracer) and np.min(position) < 0:
        raise ValueError(f"KVCache: positions count from 0, got position={position}")
    return jnp.asarray(position) if shape else position


def must_see(length: int, position: jax.typing.ArrayLike, tokens: int) -> None:
    """Raise ValueError for a number of rows that hides a query's own token; traced ones pass."""
    if not isinstance(position, Tracer) and length < np.max(position) + tokens:
        raise ValueError(
            "KVCache: every query must see its own token, got "
            f"length={length}, position={position}, tokens={tokens}; leave length out, or give at "
            "least position + tokens"
        )


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
    axes = 0, *map(_sequence_axes, (keys, values)), 0 if jnp.ndim(position) else None
    run = jax.vmap(functools.partial(attend_matrices, tokens), axes)
    rows = jax.tree.map(jnp.asarray, tuple(map(_without_sequences, (keys, values))))
    attended = run(shared, *rows, along_sequences(position, place))
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


def _is_shared(rows: Rows) -> bool:
    """Whether one tensor scale is for all sequences."""
    scale = rows.tensor_scale if isinstance(rows, PackedRows) else None
    return scale is not None and scale.shape[0] != rows.shape[0]


def _sequence_axes(rows: Rows) -> Any:
    """The axes along which `vmap` takes sequences."""
    if not isinstance(rows, PackedRows):
        return 0
    axes: dict[str, Any] = dict(codes=0, scales=0, tensor_scale=None if _is_shared(rows) else 0)
    return dataclasses.replace(rows, **axes)


def _without_sequences(rows: Rows) -> Rows:
    """A tensor scale that is for all of them without the axis that counts them."""
    if not isinstance(rows, PackedRows) or not _is_shared(rows):
        return rows
    assert rows.tensor_scale is not None
    return dataclasses.replace(rows, tensor_scale=rows.tensor_scale[0])
