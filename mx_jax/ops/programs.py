"""For JAX's transformations of programs: what `jax.checkpoint` keeps, what `jax.export` may call.

Importing this registers the handlers that a loaded program calls.
"""

import jax
from jax.core import AbstractValue
from jax.extend.core import Primitive

from mx_jax.backends.cpu_ffi import library

# What every cast calls its codes and scales, by `jax.ad_checkpoint.checkpoint_name`. A name is no
# operation: programs without `jax.checkpoint` are what they were.
QUANTIZED = "mx_jax.quantized"

_PRODUCTS = frozenset({"mx_matmul"})

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


def export_targets() -> tuple[str, ...]:
    """Names of the custom calls that a program exported for CPUs or GPUs may have.

    `jax.export` refuses custom calls without a promise of stability. These are kept
    within a release: load a program with the version of `mx_jax` that saved it, and with the C++
    library. On GPUs products of float8 have one of XLA's own, which says how codes lie in memory.

    Returns:
      Names in order; XLA's own alone where the C++ library is not built.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> allowed = [
      ...     jax.export.DisabledSafetyCheck.custom_call(name) for name in mx_jax.export_targets()
      ... ]
      >>> w = mx_jax.quantize(jnp.ones((64, 8)), "mxfp4", axis=0)
      >>> layer = jax.jit(lambda x: mx_jax.matmul(x, w, recipe="mxfp4"))
      >>> (batch,) = jax.export.symbolic_shape("batch")
      >>> x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
      >>> saved = jax.export.export(layer, disabled_checks=allowed)(x).serialize()
      >>> jax.export.deserialize(saved).call(jnp.ones((3, 64))).shape
      (3, 8)
    """
    loaded = library.load()
    names = () if isinstance(loaded, str) else loaded.targets
    return tuple(sorted((*names, "LayoutConstraint")))


library.load()
