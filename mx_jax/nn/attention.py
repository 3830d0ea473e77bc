"""Causal attention whose heads of keys and values are shared by several of queries."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mx_jax.codecs.explicit_axes import explicit_sharding, reshape_along
from mx_jax.ops.attention import attend_matrices
from mx_jax.packed import PackedRows, Rows


def merge_heads(x: jax.Array, like: jax.Array | None = None) -> jax.Array:
    """`[batch, tokens, heads, features]` as matrices `[batch * heads, tokens, features]`.

    On explicit axes they lie where the matrices of `like` do; without it, where the batch does.
    """
    batch, tokens, heads, features = x.shape
    shape = (batch * heads, tokens, features)
    return reshape_along(x.swapaxes(1, 2), shape, x if like is None else like)


def needs_four_axes(operation: str, **given: jax.Array) -> None:
    """Raise ValueError for arrays that are not `[batch, tokens, heads, features]`."""
    for name, x in given.items():
        if x.ndim != 4:
            raise ValueError(
                f"{operation}: needs {name} as [batch, tokens, heads, features], got "
                f"{name}.shape={x.shape}"
            )


def position_of_matrices(
    position: jax.typing.ArrayLike, batch: int, heads: int
) -> jax.typing.ArrayLike:
    """A position for all sequences as it is, one for each of them as one for each matrix.

    Raises:
      ValueError: no integers, another shape, or a known position below zero.
    """
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
    return jnp.repeat(jnp.asarray(position), heads) if shape else position


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
      keys: `[batch * heads, length, features]`, as values or as codes; a head serves as many query
        heads as there are for each.
      values: likewise.
      position: row of the first query's own token, one for all or int `[batch * heads]`.

    Returns:
      Like query.

    Raises:
      ValueError: a query without four axes, of other features, or of whole numbers; heads that do
        not divide the query's.
    """
    needs_four_axes("attend", query=query)
    batch, tokens, num_queries, features = query.shape
    matrices = keys.shape[0]
    if batch * num_queries == 0 or (batch * num_queries) % matrices or matrices % batch:
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
    # One token's heads lie as matrices of keys take them.
    place = keys.codes if isinstance(keys, PackedRows) else keys
    shared = query if tokens == 1 else query.swapaxes(1, 2)
    together = batch * num_queries // matrices * tokens
    shared = reshape_along(shared, (matrices, together, features), place)
    if jnp.ndim(position) == 0:
        attended = attend_matrices(tokens, shared, keys, values, position)
    else:
        axes = 0, _matrix_axes(keys), _matrix_axes(values), 0
        attended = jax.vmap(functools.partial(_attend_one, tokens), axes)(
            shared, keys, values, jnp.asarray(position)
        )
    if tokens > 1:
        by_head = (batch, num_queries, tokens, features)
        attended = reshape_along(attended, by_head, attended).swapaxes(1, 2)
    else:
        attended = reshape_along(attended, query.shape, attended)
    if (sharding := explicit_sharding(query)) is not None:
        attended = jax.sharding.reshard(attended, sharding)
    return attended.astype(query.dtype)


def _matrix_axes(rows: Rows) -> Any:
    """Which axes of rows `vmap` takes matrices from; one tensor scale is for all."""
    if not isinstance(rows, PackedRows):
        return 0
    scale = rows.tensor_scale
    of_each = scale is not None and scale.shape[0] == rows.shape[0]
    axes: dict[str, Any] = dict(codes=0, scales=0, tensor_scale=0 if of_each else None)
    return dataclasses.replace(rows, **axes)


def _attend_one(
    tokens: int, shared: jax.Array, keys: Rows, values: Rows, position: jax.Array
) -> jax.Array:
    """Of one matrix of keys."""
    keys, values = (jax.tree.map(lambda x: x.reshape(1, *x.shape[-2:]), x) for x in (keys, values))
    return attend_matrices(tokens, shared[None], keys, values, position)[0]
