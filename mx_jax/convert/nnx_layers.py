"""flax.nnx: what takes the place of a layer's product, how it gets into the layer and out again.

A layer that Flax gives an attribute for its product gets another one there. Other modules, and an
attention that keeps a cache in a format, become of a subclass with another call.
"""

import contextvars
import copyreg
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from mx_jax.convert.caches import CachedAttention, CacheFormat, as_array, is_plain
from mx_jax.convert.functions import call_of_model
from mx_jax.convert.jaxpr import Module, decided, in_module, tracing
from mx_jax.convert.kinds import ATTENTION, EMBED, Kind, kind_of
from mx_jax.convert.report import Report, recorders_of
from mx_jax.convert.rules import Decision, Rule
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
        with named_in_errors(self.layer), decided(), self.name.context():
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
    """The kind of a layer, and the fields of `Layer` that rules judge it by.

    None: it has no attribute for a product, or an attention of its own there.
    """
    kind = kind_of(layer)
    if kind is None:
        return None
    obstacle = _obstacle(layer, kind)
    if kind is ATTENTION and obstacle == _OWN_ATTENTION:
        return None
    stored = tuple(kind.kernel(layer).shape)
    facts = kind.facts(layer, stored[len(stack(layer, kind)) :])
    if "kernel" in facts:
        # With the axes of a stack.
        facts["kernel"] = stored
    return kind, facts | {"obstacle": facts["obstacle"] or obstacle}


# Whose products a trace of the call shows.
_OWN_ATTENTION = "has its own attention_fn"


def _obstacle(layer: Any, kind: Kind) -> str | None:
    # First: a property of our own layers draws a key when it is read.
    if isinstance(getattr(layer, "recipe", None), Recipe):
        return "has its own recipe"
    return kind.nnx and kind.nnx.obstacle(layer, (Injected, KeyedInjected))


def stack(layer: Any, kind: Kind) -> tuple[int, ...]:
    """The leading axes of a stack of layers made by nnx.vmap; () for a single one."""
    shape = kind.kernel(layer).shape
    return tuple(shape[: len(shape) - kind.kernel_ndim(layer)])


def replaced(layer: Any, kind: Kind) -> Any:
    """What `put` will take the place of."""
    return kind.nnx and getattr(layer, kind.nnx.attribute)


def put(layer: Any, kind: Kind, product: Injected | KeyedInjected) -> None:
    """Make a layer multiply by a product."""
    # Static values are a part of the graph definition; a stream is data.
    wrap = nnx.static if isinstance(product, Injected) else nnx.data
    assert kind.nnx is not None
    setattr(layer, kind.nnx.attribute, wrap(product))
    if getattr(layer, "promote_dtype", None) is promote_dtype:
        # A kernel may be an MXArray, which is then used as it is.
        layer.promote_dtype = nnx.static(OperandPromotion(replaced=promote_dtype))


def take_back(layer: Any) -> None:
    """Undo `put`, `put_cache` and `put_call`, if they were done."""
    while hasattr(type(layer), "_mx_base"):
        if "mx_cache" in vars(layer):
            _take_back_cache(layer)
        for name in ("mx_cache", "mx_call", "mx_stream"):
            if name in vars(layer):
                delattr(layer, name)
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


# Calls ------------------------------------------------------------------------------------------

_TAG = "mx_jax"
# Adapters are trained beside what rules quantize.
ADAPTERS = (nnx.LoRA,)
# They multiply nothing, or elementwise.
_WITHOUT_PRODUCT = (nnx.BatchNorm, nnx.Dropout, nnx.GroupNorm, nnx.LayerNorm, nnx.RMSNorm)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a converted model knows of itself; static, and equal for equal models.

    Attributes:
      rules: that it follows.
      strict: whether a rule that matches nothing is an error; None: nobody is told.
      modules: those whose products a trace shows, by path.
      decisions: about the other layers.
      used: rules that matched something so far.
    """

    rules: tuple[Rule, ...]
    strict: bool | None
    modules: Mapping[str, Module] = dataclasses.field(hash=False)
    decisions: tuple[Decision, ...] = dataclasses.field(compare=False)
    used: set[int] = dataclasses.field(compare=False, default_factory=set[int])

    def tell(self, path: str, decisions: tuple[Decision, ...]) -> None:
        """Record decisions; if they are those of the whole model, warn of rules without any."""
        records = recorders_of(self.rules)
        for record in records:
            for decision in decisions:
                record.add(decision)
        result = Report(rules=self.rules, decisions=(*self.decisions, *decisions))
        if not path and not records and self.strict is not None:
            result.check("convert.nnx", self.strict, self.used)
        self.used.update(set(range(len(self.rules))) - set(result.unused))


@dataclasses.dataclass(frozen=True)
class Call:
    """What a module of a converted model knows when it is called.

    Attributes:
      model: the model.
      path: the module's first.
      is_decided: whether its products are.
    """

    model: Conversion
    path: str
    is_decided: bool


def multiplies_itself(layer: Any, kind: Kind | None, converts: bool) -> bool:
    """Whether a trace of a module's call shows products, besides those that it got others for."""
    flaxs = class_of(layer).__module__.startswith("flax.")
    if isinstance(layer, _WITHOUT_PRODUCT) or (flaxs and not callable(layer)):
        return False
    # An embedding multiplies past its attribute.
    return not (converts and flaxs) or kind is EMBED


def class_of(layer: Any) -> type:
    """The class that a module had before conversion."""
    cls: Any = type(layer)
    while hasattr(cls, "_mx_base"):
        cls = cls._mx_base
    return cls


def matrix_of(layer: Any) -> nnx.Param | None:
    """The first parameter of two axes or more that a module has beside known layers."""
    if kind_of(layer) is not None or isinstance(layer, _WITHOUT_PRODUCT):
        return None
    own = (value for value in vars(layer).values() if isinstance(value, nnx.Param))
    return next((value for value in own if len(getattr(value, "shape", ())) >= 2), None)


def read_stored(layer: Any) -> None:
    """Make Flax's own embedding one that looks rows up in a stored table."""
    if class_of(layer) is nnx.Embed:
        object.__setattr__(layer, "__class__", StoredEmbed)
        if "mx_call" in vars(layer):
            _become(layer, _traced_methods)


def put_call(layer: Any, call: Call, stream: nnx.RngStream | None) -> None:
    """Make a module's call one that is traced, or a part of one."""
    layer.mx_call = nnx.static(call)
    if stream is not None:
        layer.mx_stream = stream
    _become(layer, _traced_methods)


def _traced_methods(base: type) -> dict[str, Any]:
    return {name: _in_call(name, method) for name, method in _methods(base).items()}


@functools.lru_cache(maxsize=1024)
def _methods(base: type) -> dict[str, Callable[..., Any]]:
    """The methods that a class does not have of flax.nnx, private ones apart."""
    inherited = {*dir(nnx.Module)} - {"__call__"}
    found = {name: inspect.getattr_static(base, name) for name in {*dir(base)} - inherited}
    return {
        name: member
        for name, member in found.items()
        # nnx.jit makes objects of them.
        if callable(member) and hasattr(member, "__get__") and not isinstance(member, type)
        if not isinstance(member, staticmethod | classmethod)
        if name == "__call__" or name[0] != "_"
    }


def _in_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose products are its module's; the outermost call is traced."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        here: Call = self.mx_call
        if tracing.value == here.model.rules:
            with (decided if here.is_decided else in_module)(here.path):
                return method(self, *args, **kwargs)
        if name != "__call__" or here.is_decided:
            return method(self, *args, **kwargs)
        with decided():
            return _traced(self, here.model, here.path, args, kwargs)

    return run


def _traced(self: Any, model: Conversion, path: str, args: Any, kwargs: Any) -> Any:
    """A call as a function of the state of all that takes part, which changes where it did."""
    key = self.mx_stream() if "mx_stream" in vars(self) else None
    nodes = (self, args, kwargs)
    before = nnx.graphdef(nodes)
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graph, params, rest = context.split(nodes, nnx.Param, ...)

        def call(params: Any, rest: Any) -> Any:
            with nnx.merge_context(_TAG, True) as context:
                inner = context.merge(graph, params, rest)
            result = type(self).__call__(inner[0], *inner[1], **inner[2])
            same = nnx.graphdef(inner) == before
            with nnx.split_context(_TAG) as context:
                after, state = context.split(inner)
            return result, state, None if same else _Graph(after)

        result, state, after = call_of_model(
            call,
            (params, rest),
            {},
            rules=model.rules,
            modules=model.modules,
            key=key,
            tell=functools.partial(model.tell, path),
        )
        if after is not None:
            with nnx.merge_context(_TAG, False) as context:
                context.merge(after.graph, state)
            return result
    given = dict(nnx.to_flat_state(nnx.merge_state(params, rest)))
    changed = [(at, new) for at, new in nnx.to_flat_state(state) if not _same(new, given[at])]
    if changed:
        nnx.update(nodes, nnx.from_flat_state(changed))
    return result


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A graph definition as a result of a trace."""

    graph: Any


def _same(new: Any, old: Any) -> bool:
    """Whether what a Variable holds is what it held."""
    return all(x is y for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))


def _become(layer: Any, own: Callable[[type], dict[str, Any]]) -> None:
    object.__setattr__(layer, "__class__", _subclass(type(layer), own))


@functools.lru_cache(maxsize=1024)
def _subclass(base: type, own: Callable[[type], dict[str, Any]]) -> type:
    """One for each class, so that equal models have equal graphs; it looks like its base."""
    looks = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    body = looks | own(base) | {"_mx_base": base, "_mx_own": staticmethod(own)}
    return _metaclass(type(base))(base.__name__, (base,), body)


@functools.cache
def _metaclass(base: type) -> type:
    """One whose classes are pickled by what they are made of: no module has them by name."""
    made = base if base.__name__ == "_Made" else type("_Made", (base,), {})
    copyreg.pickle(made, lambda cls: (_subclass, (cls._mx_base, cls._mx_own)))
    return made


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
    _become(layer, _caching)


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


def _caching(base: type) -> dict[str, Any]:
    """What an attention does otherwise, whose cache is in a format."""

    def init_cache(self: Any, *args: Any, **options: Any) -> None:
        """As the class does it: the arrays that it makes are gone when their rows are there."""
        base.init_cache(self, *args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        arrays = self.cached_key[...]
        _keep(self, self.mx_cache.empty(arrays.shape, arrays.dtype), self.cache_index[...])

    def call(self: Any, *args: Any, decode: bool | None = None, **options: Any) -> Any:
        run = functools.partial(base.__call__, self, *args, **options)
        decodes = self.decode if decode is None else decode
        if not decodes or self.cached_key is None:
            return run(decode=decode)
        token = _decoding.set(self)
        try:
            return run(decode=False)
        finally:
            _decoding.reset(token)

    attention_fn = property(_attention_fn, _set_attention_fn)
    return {"__call__": call, "init_cache": init_cache, "attention_fn": attention_fn}


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
