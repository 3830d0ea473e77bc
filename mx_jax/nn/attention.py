"""Causal attention whose heads of keys and values are shared by several of queries."""

import jax
import jax.numpy as jnp


def merge_heads(x: jax.Array) -> jax.Array:
    """`[batch, tokens, heads, features]` as matrices `[batch * heads, tokens, features]`."""
    batch, tokens, heads, features = x.shape
    return x.swapaxes(1, 2).reshape(batch * heads, tokens, features)


def attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, position: jax.typing.ArrayLike
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`, query `i` over the rows up to `position + i`.

    Args:
      query: `[batch, tokens, query heads, features]`.
      keys: `[batch * heads, length, features]`; a head serves as many query heads as there are
        for each.
      values: likewise.
      position: row of the first query's own token.

    Returns:
      Like query.

    Raises:
      ValueError: the heads do not divide the query's.
    """
    batch, tokens, num_queries, features = query.shape
    matrices, length, _ = keys.shape
    if (batch * num_queries) % matrices or matrices % batch:
        raise ValueError(
            "attend: heads of keys must divide heads of queries, got "
            f"query.shape={query.shape}, keys.shape={keys.shape}"
        )
    shared = merge_heads(query).reshape(matrices, -1, features)
    scores = jnp.einsum("hqd,hkd->hqk", shared, keys, preferred_element_type=jnp.float32)
    last = position + jnp.arange(tokens)
    seen = jnp.arange(length) <= jnp.tile(last, shared.shape[1] // tokens)[:, None]
    scores = jnp.where(seen, scores * features**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(values.dtype)
    attended = jnp.einsum("hqk,hkd->hqd", weights, values)
    attended = attended.reshape(batch, num_queries, tokens, features).swapaxes(1, 2)
    return attended.astype(query.dtype)
