"""Causal attention whose heads of keys and values are shared by several of queries."""

import jax
import jax.numpy as jnp


def attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, position: jax.typing.ArrayLike
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`, query `i` over the rows up to `position + i`.

    Args:
      query: `[batch, query heads, tokens, features]`.
      keys: `[batch, heads, length, features]`.
      values: likewise.
      position: row of the first query's own token.

    Returns:
      Like query.

    Raises:
      ValueError: the heads do not divide the query's.
    """
    batch, num_queries, tokens, features = query.shape
    heads, length = keys.shape[1:3]
    if num_queries % heads:
        raise ValueError(
            "attend: heads of keys must divide heads of queries, got "
            f"query.shape={query.shape}, keys.shape={keys.shape}"
        )
    shared = query.reshape(batch, heads, -1, features)
    scores = jnp.einsum("bhqd,bhkd->bhqk", shared, keys, preferred_element_type=jnp.float32)
    last = position + jnp.arange(tokens)
    seen = jnp.arange(length) <= jnp.tile(last, num_queries // heads)[:, None]
    scores = jnp.where(seen, scores * features**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(values.dtype)
    attended = jnp.einsum("bhqk,bhkd->bhqd", weights, values)
    return attended.reshape(query.shape).astype(query.dtype)
