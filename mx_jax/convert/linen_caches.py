"""flax.linen: attention that decodes, with its cache in the format of a rule.

Flax's own call runs as if it did not decode, so that it makes queries, keys and values of the new
tokens alone; what it then calls attention with them keeps them in the layer's variables.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mx_jax.convert.caches import CacheFormat, append, attended, is_plain
from mx_jax.convert.linen_products import AttentionEinsum, Lender

_CALL = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)
_EINSUMS = ("qk_attn_weights_einsum", "attn_weights_value_einsum")
_COLLECTION = "cache"


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """What a layer that decodes calls in place of its attention function.

    Attributes:
      lender: of the layer.
      format: of the cache.
      attention_fn: the layer's own.
    """

    lender: Lender
    format: CacheFormat
    attention_fn: Callable[..., jax.Array]

    @property
    def __signature__(self) -> inspect.Signature:
        # Flax leaves out what an attention function does not take.
        return inspect.signature(self.attention_fn)

    def __call__(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, **options: Any
    ) -> jax.Array:
        """Keep the keys and values of new tokens, and attend over all so far."""
        layer = self.lender.layer
        started = layer.has_variable(_COLLECTION, "cached_key")
        empty = functools.partial(self.format.empty, keys.shape, keys.dtype)
        own_keys = layer.variable(_COLLECTION, "cached_key", lambda: empty().keys)
        own_values = layer.variable(_COLLECTION, "cached_value", lambda: empty().values)
        index = layer.variable(_COLLECTION, "cache_index", lambda: jnp.array(0, jnp.int32))
        if not started:
            # As in Flax, these are the longest text there will be, not its tokens.
            return self.attention_fn(query, keys, values, **options)
        cache = self.format.of_rows(own_keys.value, own_values.value)
        cache, position = append(cache, query, keys, values, index.value), index.value
        own_keys.value, own_values.value = cache.keys, cache.values
        index.value = position + keys.shape[-3]
        attention, mask = None, None
        if not self._is_plain(options):
            mask = options.pop("mask", None)
            attention = functools.partial(self.attention_fn, **options)
        return attended(cache, query, keys.shape[-2], position, attention, mask)

    def _is_plain(self, options: dict[str, Any]) -> bool:
        einsums = [options.get(name) for name in _EINSUMS]
        quantized = [
            not isinstance(einsum, AttentionEinsum)
            or einsum.lender.decide(einsum.product).recipe is not None
            for einsum in einsums
            if einsum is not None
        ]
        own = self.attention_fn is not nn.dot_product_attention
        return not (own or any(quantized)) and is_plain(options)


def cache_loans(lender: Lender, method: Any, loans: dict[str, Any]) -> dict[str, Any]:
    """What to set on an attention while it decodes, by a rule with a cache.

    Args:
      lender: of the layer.
      method: the function that runs, below Flax's wrappers.
      loans: what is set already.
    """
    layer: Any = lender.layer
    if method is not _CALL or all(rule.cache is None for rule in lender.rules):
        return {}
    attention_fn = loans.get("attention_fn", layer.attention_fn)
    obstacle = None
    if not layer.decode:
        obstacle = "decode=False"
    elif "mask" not in inspect.signature(attention_fn).parameters:
        obstacle = "its attention_fn takes no mask"
    decision = lender.decide("cache", is_cache=True, obstacle=obstacle)
    if decision.cache is None:
        return {}
    return {
        "decode": False,
        "attention_fn": CachedAttention(lender, decision.cache, attention_fn),
    }
