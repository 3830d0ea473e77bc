"""flax.nnx: what takes the place of a layer's product, how it gets into the layer and out again.

A layer that Flax gives an attribute for its product gets another one there. One that multiplies by
name, and an attention that keeps a cache in a format, become of a subclass with another call.
"""

import contextvars
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from mx_jax.convert.caches import CachedAttention, CacheFormat, as_array, is_plain
from mx_jax.convert.kinds import FOREIGN, Kind, foreign_facts, kind_of
from mx_jax.nn.cache import KVCache
from mx_jax.nn.layers import named_in_errors
from mx_jax.nn.nnx import RNG_STREAM, promote_operands
from mx_jax.nn.stored import quantized_in
from mx_jax.ops.dot_general import dot_general
from mx_jax.ops.tags import LayerName
from mx_jax.packed import rows_of
from mx_jax.recipes import Recipe, high_precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Injected:
    """A product in the place of a layer's own; static, so equal models have equal graphs.

    Attributes:
      operation: what the layer now calls.
      replaced: what it called before.
      layer: what errors call the layer. Not its path, by which equal layers would differ.
      name: its path, by which they do not.
    """

    operation: Callable[..., Any]
    replaced: Any
    layer: str
    name: LayerName

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The operation's result."""
        with named_in_errors(self.layer), self.name.context():
            return self.operation(*args, **options)


class KeyedInjected(nnx.Module):
    """`Injected`, with a stream that gives each use a fresh key; in a stack, one for each layer."""

    def __init__(self, injected: Injected, stream: nnx.RngStream):
        self.injected = nnx.static(injected)
        self.stream = stream

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The operation's result."""
        stacked = self.stream.key.shape
        if stacked:
            raise ValueError(
                f"convert.nnx: a layer of a stack got the streams {RNG_STREAM!r} of all its "
                f"layers, of shape={stacked}; where the stack is run, map them with the "
                "parameters, e.g. StateAxes({(nnx.Param, nnx.RngState): 0, ...: None})"
            )
        return self.injected(*args, **options, key=self.stream())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperandPromotion:
    """Flax's promote_dtype, past which quantized kernels go as they are.

    Attributes:
      replaced: Flax's own.
    """

    replaced: Callable[..., Any]

    def __call__(self, args: Any, /, **options: Any) -> Any:
        """The promoted operands."""
        return promote_operands(args, **options)


class StoredEmbed(nnx.Embed):
    """An Embed whose table is an MXArray, packed or not; `convert.weights` makes it of Flax's.

    Only the rows that are asked for are decoded. `attend` multiplies by the codes, and leaves its
    query in high precision, as a converted Embed does.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Rows of the table, `[*inputs, features]`."""
        table = quantized_in(self.embedding[...])
        if table is None:
            return super().__call__(inputs, out_sharding)
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError(f"Embed: needs integers, got inputs.dtype={inputs.dtype}")
        values = rows_of(table, jnp.asarray(inputs)).dequantize(self.dtype or table.dtype)
        return values if out_sharding is None else jax.sharding.reshard(values, out_sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The query times the table, along the features."""
        table = quantized_in(self.embedding[...])
        if table is None:
            return super().attend(query, out_sharding)
        query, table = promote_operands((query, table), dtype=self.dtype)
        dimensions = (((query.ndim - 1,), (1,)), ((), ()))
        product = self.promote_dtype
        if not isinstance(product, Injected):
            return _product(query, table, dimensions, out_sharding)
        with named_in_errors(product.layer), product.name.context():
            return _product(query, table, dimensions, out_sharding)


def _product(query: Any, table: Any, dimensions: Any, out_sharding: Any) -> jax.Array:
    return dot_general(query, table, dimensions, recipe=high_precision(), out_sharding=out_sharding)


# Layers -------------------------------------------------------------------------------------------


def judged(layer: Any) -> tuple[Kind, dict[str, Any]] | None:
    """The kind of a layer, and the fields of `Layer` that rules judge it by; None: no product."""
    kind = kind_of(layer)
    if kind is None:
        facts = _foreign_facts(layer)
        return None if facts is None else (FOREIGN, facts)
    stored = tuple(kind.kernel(layer).shape)
    facts = kind.facts(layer, stored[len(stack(layer, kind)) :])
    if "kernel" in facts:
        # With the axes of a stack.
        facts["kernel"] = stored
    return kind, facts | {"obstacle": facts["obstacle"] or _obstacle(layer, kind)}


def _obstacle(layer: Any, kind: Kind) -> str | None:
    # First: a property of our own layers draws a key when it is read.
    if isinstance(getattr(layer, "recipe", None), Recipe):
        return "has its own recipe"
    return kind.nnx and kind.nnx.obstacle(layer, (Injected, KeyedInjected))


def stack(layer: Any, kind: Kind) -> tuple[int, ...]:
    """The leading axes of a stack of layers made by nnx.vmap; () for a single one."""
    if kind is FOREIGN:
        # Such a layer does not tell them from others.
        return ()
    shape = kind.kernel(layer).shape
    return tuple(shape[: len(shape) - kind.kernel_ndim(layer)])


def replaced(layer: Any, kind: Kind) -> Any:
    """What `put` will take the place of."""
    return kind.nnx and getattr(layer, kind.nnx.attribute)


def put(layer: Any, kind: Kind, product: Injected | KeyedInjected) -> None:
    """Make a layer multiply by a product."""
    # Static values are a part of the graph definition; a stream is data.
    wrap = nnx.static if isinstance(product, Injected) else nnx.data
    if kind.nnx is None:
        layer.mx_product = wrap(product)
        _become(layer, caching=False)
        return
    setattr(layer, kind.nnx.attribute, wrap(product))
    if getattr(layer, "promote_dtype", None) is promote_dtype:
        # A kernel may be an MXArray, which is then used as it is.
        layer.promote_dtype = nnx.static(OperandPromotion(replaced=promote_dtype))


def take_back(layer: Any) -> None:
    """Undo `put` and `put_cache`, if they were done."""
    if hasattr(type(layer), "_mx_base"):
        if "mx_cache" in vars(layer):
            _take_back_cache(layer)
            del layer.mx_cache
        else:
            del layer.mx_product
        object.__setattr__(layer, "__class__", type(layer)._mx_base)
    kind = kind_of(layer)
    if kind is None or kind.nnx is None:
        return
    if _obstacle(layer, kind) is None:
        value = getattr(layer, kind.nnx.attribute)
        value = value.injected if isinstance(value, KeyedInjected) else value
        if isinstance(value, Injected):
            setattr(layer, kind.nnx.attribute, nnx.static(value.replaced))
    promotion = getattr(layer, "promote_dtype", None)
    if isinstance(promotion, OperandPromotion):
        layer.promote_dtype = nnx.static(promotion.replaced)


def _foreign_facts(layer: Any) -> dict[str, Any] | None:
    """Fields of `Layer` that rules judge by; None if a layer has no matrix of its own."""
    kernels = [
        tuple(value.shape)
        for value in vars(layer).values()
        if isinstance(value, nnx.Param) and len(getattr(value, "shape", ())) >= 2
    ]
    inner = ["/".join(map(str, path)) for path, _ in nnx.iter_modules(layer) if path]
    found = foreign_facts(layer, kernels, inner)
    if found is None or found["obstacle"] or callable(layer):
        return found
    return found | {"obstacle": "is not callable"}


# Subclasses -------------------------------------------------------------------------------------


def _become(layer: Any, *, caching: bool) -> None:
    object.__setattr__(layer, "__class__", _subclass(type(layer), caching))


@functools.lru_cache(maxsize=1024)
def _subclass(base: type, caching: bool) -> type:
    """One for each class, so that equal models have equal graphs; it looks like its base."""
    own: dict[str, Any] = {"__call__": _traced_call}
    if caching:
        own = {
            "__call__": _caching_call,
            "init_cache": _init_cache,
            "attention_fn": property(_attention_fn, _set_attention_fn),
        }
    looks = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base)(base.__name__, (base,), looks | own | {"_mx_base": base})


def _traced_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    call = functools.partial(self._mx_base.__call__, self)
    return self.mx_product(call, args, kwargs, name=type(self).__name__)


# Caches -------------------------------------------------------------------------------------------


def keeps_cache(layer: Any) -> bool:
    """Whether a layer is one whose cache a rule may be about."""
    return isinstance(layer, nnx.MultiHeadAttention)


def cache_obstacle(layer: nnx.MultiHeadAttention) -> str | None:
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


def put_cache(layer: Any, format: CacheFormat) -> None:
    """Make a layer keep its cache in a format, the one that it has included."""
    if layer.cached_key is not None:
        cache = format.holding(layer.cached_key[...], layer.cached_value[...])
        _keep(layer, cache, layer.cache_index[...])
    layer.mx_cache = nnx.static(format)
    _become(layer, caching=True)


def _take_back_cache(layer: Any) -> None:
    """What the cache holds is decoded, for one axis of sequences."""
    if layer.cached_key is None:
        return
    keys, values = (kept.get_value() for kept in (layer.cached_key, layer.cached_value))
    heads = layer.num_kv_heads
    if keys.codes.ndim == 3:
        batch = (keys.codes.shape[0] // heads,)
        index = layer.cache_index[...]
        layer.cached_key = nnx.Cache(as_array(keys, batch, heads))
        layer.cached_value = nnx.Cache(as_array(values, batch, heads))
        layer.cache_index = nnx.Cache(index)
        return
    warnings.warn(
        "convert: the cache of a stack is dropped when its layers are converted anew; call "
        "init_cache again",
        stacklevel=2,
    )
    layer.cached_key = layer.cached_value = nnx.data(None)


def _keep(layer: Any, cache: KVCache, index: jax.Array) -> None:
    """New Variables: the model that was converted goes on with its own."""
    layer.cached_key, layer.cached_value = nnx.Cache(cache.keys), nnx.Cache(cache.values)
    layer.cache_index = nnx.Cache(index)


def _init_cache(self: Any, *args: Any, **options: Any) -> None:
    """As the class does it: the arrays that it makes are gone when their rows are there."""
    self._mx_base.init_cache(self, *args, **options)
    arrays = self.cached_key[...]
    _keep(self, self.mx_cache.empty(arrays.shape, arrays.dtype), self.cache_index[...])


def _caching_call(self: Any, *args: Any, decode: bool | None = None, **options: Any) -> Any:
    run = functools.partial(self._mx_base.__call__, self, *args, **options)
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
    if _decoding.get() is not self:
        return own

    def get(keys: jax.Array) -> tuple[Any, Any, jax.Array]:
        kept = (self.cached_key, self.cached_value, self.cache_index)
        return tuple(variable.get_value() for variable in kept)

    def put(keys: Any, values: Any, index: jax.Array) -> None:
        self.cached_key.set_value(keys)
        self.cached_value.set_value(values)
        self.cache_index[...] = index

    return CachedAttention(
        format=self.mx_cache,
        attention_fn=own,
        get=get,
        set=put,
        is_plain=lambda options: own is nnx.dot_product_attention and is_plain(options),
        # The rows up to a token's own are what causal attention sees.
        options={"is_causal": False},
    )


def _set_attention_fn(self: Any, value: Any) -> None:
    vars(self)["attention_fn"] = value
