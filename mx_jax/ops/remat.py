"""Names for `jax.checkpoint`: what is quantized can be kept, so that nothing is quantized twice."""

import jax
from jax.core import AbstractValue
from jax.extend.core import Primitive

# What every cast calls its codes and scales, by `jax.ad_checkpoint.checkpoint_name`. A name is no
# operation: programs without `jax.checkpoint` are what they were.
QUANTIZED = "mx_jax.quantized"

_PRODUCTS = frozenset({"mx_matmul", "mx_ragged"})

save_quantized = jax.checkpoint_policies.save_only_these_names(QUANTIZED)
"""A policy for `jax.checkpoint`, `flax.linen.remat` and `flax.nnx.remat`: keep codes and scales.

Everything else is computed again in the backward pass, products too, from the codes that were kept:
a step quantizes as often as without rematerialization. Codes and scales bear the name
`"mx_jax.quantized"`, for policies of your own: to keep other names too, pass all of them to
`jax.checkpoint_policies.save_only_these_names`; to keep dots too, combine this policy with
`dots_saveable` by `save_from_both_policies`.

Examples:
  >>> import jax, jax.numpy as jnp, mx_jax
  >>> layer = lambda x, w: jax.nn.gelu(mx_jax.matmul(x, w, recipe="mxfp8"))
  >>> layer = jax.checkpoint(layer, policy=mx_jax.save_quantized)
  >>> jax.grad(lambda w: layer(jnp.ones((4, 64)), w).sum())(jnp.ones((64, 8))).shape
  (64, 8)
"""


def save_products(primitive: Primitive, *types: AbstractValue, **params: object) -> bool:
    """A policy for `jax.checkpoint`: keep products, quantized ones and JAX's own.

    JAX's `dots_saveable` compares with `lax.dot_general` and knows no other primitive, so a
    quantized product is computed again under it. This policy keeps both.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = lambda x, w: jax.nn.gelu(mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> layer = jax.checkpoint(layer, policy=mx_jax.save_products)
      >>> jax.grad(lambda w: layer(jnp.ones((4, 64)), w).sum())(jnp.ones((64, 8))).shape
      (64, 8)
    """
    dots = jax.checkpoint_policies.dots_saveable
    return primitive.name in _PRODUCTS or dots(primitive, *types, **params)
