"""Causal attention whose heads of keys and values are shared by several of queries."""

import jax
import jax.numpy as jnp

from mx_jax.packed import PackedRows, Rows


def attend(
    shared: jax.Array,
    keys: Rows,
    values: Rows,
    position: jax.typing.ArrayLike,
    tokens: int,
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`, each query over the rows up to its own.

    Args:
      shared: queries `[matrices, heads * tokens, features]`, those of the heads that a matrix of
        keys serves.
      keys: `[matrices, length, features]`, as values or as codes.
      values: likewise.
      position: row of the first token.
      tokens: how many of a head follow each other.

    Returns:
      Like shared, in the dtype that keys and values promote to.
    """
    keys, values = _values(keys), _values(values)
    scores = jnp.einsum("hqd,hkd->hqk", shared, keys, preferred_element_type=jnp.float32)
    last = position + jnp.arange(tokens)
    seen = jnp.arange(keys.shape[1]) <= jnp.tile(last, shared.shape[1] // tokens)[:, None]
    scores = jnp.where(seen, scores * shared.shape[-1] ** -0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(values.dtype)
    # Whatever rows behind the last token hold, NaN too, they take part in nothing.
    values = jnp.where((jnp.arange(keys.shape[1]) <= last[-1])[:, None], values, 0)
    return jnp.einsum("hqk,hkd->hqd", weights, values)


def _values(rows: Rows) -> jax.Array:
    return rows.unpacked().dequantize() if isinstance(rows, PackedRows) else rows
