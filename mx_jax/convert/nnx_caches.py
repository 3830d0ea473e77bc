"""flax.nnx: attention that decodes, with its cache in the format of a rule.

A subclass runs Flax's own call as if it did not decode, so that it makes queries, keys and values
of the new tokens alone; what it then calls attention with them keeps them in the layer's Variables.
"""

import contextvars
import dataclasses
import functools
import inspect
import warnings
from typing import Any

import jax
from flax import nnx

from mx_jax.convert.caches import CacheFormat, append, as_array, attended, is_plain
from mx_jax.convert.nnx_classes import standing_for
from mx_jax.nn.cache import KVCache


def keeps_cache(layer: Any) -> bool:
    """Whether a layer is one whose cache a rule may be about."""
    return isinstance(layer, nnx.MultiHeadAttention)


def obstacle(layer: nnx.MultiHeadAttention) -> str | None:
    """Why the cache of a layer stays as it is, or None."""
    if type(layer).__call__ is not nnx.MultiHeadAttention.__call__:
        return "has a call of its own"
    if layer.query.kernel.ndim > 3 and layer.cached_key is not None:
        return "is a stack with a cache already: convert it before init_cache"
    taken = inspect.signature(layer.attention_fn).parameters
    takes_any = any(own.kind is inspect.Parameter.VAR_KEYWORD for own in taken.values())
    if "mask" not in taken and not takes_any:
        return "its attention_fn takes no mask"
    return None


def put(layer: Any, format: CacheFormat) -> None:
    """Make a layer keep its cache in a format, the one that it has included."""
    if layer.cached_key is not None:
        cache = format.holding(layer.cached_key[...], layer.cached_value[...])
        _keep(layer, cache, layer.cache_index[...])
    layer.mx_cache = nnx.static(format)
    object.__setattr__(layer, "__class__", _caching_class(type(layer)))


def take_back(layer: Any) -> None:
    """Undo `put`, if it was done; what the cache holds is decoded, for one axis of sequences."""
    base = getattr(type(layer), "_mx_uncached", None)
    if base is None:
        return
    if layer.cached_key is not None:
        keys, values = (kept.get_value() for kept in (layer.cached_key, layer.cached_value))
        heads = layer.num_kv_heads
        if keys.codes.ndim == 3:
            batch = (keys.codes.shape[0] // heads,)
            index = layer.cache_index[...]
            layer.cached_key = nnx.Cache(as_array(keys, batch, heads))
            layer.cached_value = nnx.Cache(as_array(values, batch, heads))
            layer.cache_index = nnx.Cache(index)
        else:
            warnings.warn(
                "convert: the cache of a stack is dropped when its layers are converted anew; call "
                "init_cache again",
                stacklevel=2,
            )
            layer.cached_key = layer.cached_value = nnx.data(None)
    del layer.mx_cache
    object.__setattr__(layer, "__class__", base)


def _keep(layer: Any, cache: KVCache, index: jax.Array) -> None:
    """New Variables: the model that was converted goes on with its own."""
    layer.cached_key, layer.cached_value = nnx.Cache(cache.keys), nnx.Cache(cache.values)
    layer.cache_index = nnx.Cache(index)


@functools.lru_cache(maxsize=1024)
def _caching_class(base: type) -> type:
    """One for each class, so that equal models have equal graphs."""
    own = {
        "__call__": _call,
        "init_cache": _init_cache,
        "attention_fn": property(_attention_fn, _set_attention_fn),
        "_mx_uncached": base,
    }
    return standing_for(base, own)


def _init_cache(self: Any, *args: Any, **options: Any) -> None:
    """As the class does it: the arrays that it makes are gone when their rows are there."""
    self._mx_uncached.init_cache(self, *args, **options)
    arrays = self.cached_key[...]
    _keep(self, self.mx_cache.empty(arrays.shape, arrays.dtype), self.cache_index[...])


def _call(self: Any, *args: Any, decode: bool | None = None, **options: Any) -> Any:
    run = functools.partial(self._mx_uncached.__call__, self, *args, **options)
    decodes = self.decode if decode is None else decode
    if not decodes or self.cached_key is None:
        return run(decode=decode)
    token = _decoding.set(self)
    try:
        return run(decode=False)
    finally:
        _decoding.reset(token)


# The layer whose call is under way, of each thread: what it calls attention with is its alone.
_decoding: contextvars.ContextVar[Any] = contextvars.ContextVar("decoding", default=None)


def _attention_fn(self: Any) -> Any:
    own = vars(self)["attention_fn"]
    return _CachedAttention(self, own) if _decoding.get() is self else own


def _set_attention_fn(self: Any, value: Any) -> None:
    vars(self)["attention_fn"] = value


@dataclasses.dataclass(frozen=True, eq=False)
class _CachedAttention:
    """What a layer that decodes calls in place of its attention function."""

    layer: Any
    attention_fn: Any

    def __call__(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, **options: Any
    ) -> jax.Array:
        layer = self.layer
        own_keys, own_values = layer.cached_key, layer.cached_value
        cache = layer.mx_cache.of_rows(own_keys.get_value(), own_values.get_value())
        position = layer.cache_index[...]
        cache = append(cache, query, keys, values, position)
        own_keys.set_value(cache.keys)
        own_values.set_value(cache.values)
        layer.cache_index[...] = position + keys.shape[-3]
        attention, mask = None, None
        if self.attention_fn is not nnx.dot_product_attention or not is_plain(options):
            # The rows up to a token's own are what causal attention sees.
            mask = options.pop("mask", None)
            attention = functools.partial(self.attention_fn, **options | {"is_causal": False})
        return attended(cache, query, keys.shape[-2], position, attention, mask)
