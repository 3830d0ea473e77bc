"""Causal attention whose heads of keys and values are shared by several of queries."""

import jax

from mx_jax.ops.attention import attend_matrices
from mx_jax.packed_rows import Rows


def merge_heads(x: jax.Array) -> jax.Array:
    """`[batch, tokens, heads, features]` as matrices `[batch * heads, tokens, features]`."""
    batch, tokens, heads, features = x.shape
    return x.swapaxes(1, 2).reshape(batch * heads, tokens, features)


def attend(query: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`, query `i` over the rows up to `position + i`.

    Args:
      query: `[batch, tokens, query heads, features]`.
      keys: `[batch * heads, length, features]`, as values or as codes; a head serves as many query
        heads as there are for each.
      values: likewise.
      position: row of the first query's own token.

    Returns:
      Like query.

    Raises:
      ValueError: the heads do not divide the query's.
    """
    batch, tokens, num_queries, features = query.shape
    matrices = keys.shape[0]
    if (batch * num_queries) % matrices or matrices % batch:
        raise ValueError(
            "attend: heads of keys must divide heads of queries, got "
            f"query.shape={query.shape}, keys.shape={keys.shape}"
        )
    # One token's heads lie as matrices of keys take them.
    shared = query if tokens == 1 else merge_heads(query)
    shared = shared.reshape(matrices, -1, features)
    attended = attend_matrices(tokens, shared, keys, values, position)
    if tokens > 1:
        attended = attended.reshape(batch, num_queries, tokens, features).swapaxes(1, 2)
    return attended.reshape(query.shape).astype(query.dtype)
