"""flax.linen: an unmodified module as one whose layers follow rules.

A layer that takes its product as an attribute (`kinds.py`) gets another one for the length of a
call: what runs is a clone that Flax bound for it, so nobody else sees the change. Layers of Flax
that call jax.numpy by name are answered in their place. Others show in a trace.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import Scope, freeze, lift
from flax.linen.dtypes import promote_dtype
from flax.linen.module import InterceptorContext, merge_param
from flax.linen.transforms import lift_direct_transform

from mx_jax.convert import kinds
from mx_jax.convert.caches import CachedAttention
from mx_jax.convert.functions import call_of_model
from mx_jax.convert.jaxpr import Module, decided, in_module, tracing
from mx_jax.convert.rules import (
    Decision,
    Layer,
    Report,
    Rule,
    as_rules,
    decide,
    record,
    recorded,
    recorders_of,
)
from mx_jax.nn import layers
from mx_jax.nn import linen as mx_linen
from mx_jax.nn.linen import RNG_STREAM
from mx_jax.ops.arguments import Key
from mx_jax.packed import Quantized, rows_of
from mx_jax.recipes import Recipe, high_precision
from mx_jax.reference.random_bits import DerivedKey

Call = Callable[..., Any]
Variables = Mapping[str, Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# Conversions that are under way: (rules, path of the root).
_active: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("active", default=())


def linen(module: nn.Module, rules: Rule | Sequence[Rule], *, strict: bool = False) -> nn.Module:
    """A module whose layers follow rules: same parameters, same names, same methods.

    The module is of a subclass of its own class with the same fields. While one of its methods
    runs, layers below it that have an attribute for their product are given another one, and what
    else the call multiplies is made anew in its jaxpr, as by `convert.function`. Nothing is stored,
    neither in the module nor in its variables, so checkpoints go both ways and `original` takes the
    conversion back. Modules with equal fields and rules are equal: a rebuilt model does not
    retrace. Stochastic recipes draw from the stream `"quantize"`.

    A linen module has no layers before it runs: a warning of rules that match nothing comes at the
    end of `init`, and of an `apply` of `__call__`, unless they matched before.

    Args:
      module: an unbound module; a converted one gets the new rules instead of its old.
      rules: the first that matches a layer decides; see `Rule`.
      strict: whether a rule that matched nothing is an error instead of an `UnusedRuleWarning`.

    Returns:
      An unbound module. `bind` is not offered: layers called past the module's own methods would
      silently stay in high precision.

    Raises:
      TypeError: not a flax.linen module, or not rules.
      ValueError: a bound module; with strict, from `init` and `apply`, a rule that matched nothing.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from mx_jax import convert, recipes
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
      >>> quantized = convert.linen(model, [convert.Rule("layers_0", recipes.mxfp8())])
      >>> x = jnp.ones((4, 32))
      >>> variables = model.init(jax.random.key(0), x)
      >>> quantized.apply(variables, x).shape
      (4, 10)
      >>> print(convert.report(model, [convert.Rule("layers_0", recipes.mxfp8())], x))
      layer     type   kernel  rule  recipe
      layers_0  Dense  32x64   0     mxfp8
      layers_2  Dense  64x10   -     (no rule matches)
      1 of 2 layers converted
    """
    if not isinstance(module, nn.Module):
        refuse_wrapper(module, "convert.linen")
        raise TypeError(
            f"convert.linen: needs a flax.linen module, got {type(module).__name__}; "
            "use convert.nnx for flax.nnx"
        )
    if module.scope is not None:
        raise ValueError(
            f"convert.linen: needs an unbound module, got {type(module).__name__} bound at "
            f"{'/'.join(module.path)!r}; convert the whole model before init and apply, with rules "
            "for the part"
        )
    return _converted(original(module), as_rules(rules, "convert.linen"), strict)


def refuse_wrapper(model: object, operation: str) -> None:
    """Raise TypeError for what holds a flax.linen module, as transformers' models do."""
    if isinstance(model, nn.Module) or not isinstance(getattr(model, "module", None), nn.Module):
        return
    place = "_module" if hasattr(model, "_module") else "module"
    raise TypeError(
        f"{operation}: {type(model).__name__} is no flax.linen module, but holds one as "
        f"model.module: convert that, and put it back: model.{place} = "
        f"convert.linen(model.module, rules); the way back is model.{place} = "
        "convert.original(model.module)"
    )


def _converted(module: nn.Module, rules: tuple[Rule, ...], strict: bool) -> nn.Module:
    return _rebuilt(module, _converted_class(type(module), rules, strict))


def original(module: nn.Module) -> nn.Module:
    """The module that was converted; a module that was not, as it is."""
    base = getattr(type(module), "_mx_base", None)
    return module if base is None else _rebuilt(module, base)


def _rebuilt(module: nn.Module, cls: type) -> nn.Module:
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
    return cls(**fields)


@functools.lru_cache(maxsize=1024)
def _converted_class(base: type, rules: tuple[Rule, ...], strict: bool) -> type:
    """A subclass under rules, one for equal ones: Flax compares classes, and names by them."""
    # Its own equality and hash: otherwise it would be given new ones in place of the user's.
    kept = ("__module__", "__qualname__", "__doc__", "__eq__", "__hash__")
    body = {name: getattr(base, name) for name in kept}
    body |= {"_mx_base": base, "_mx_rules": rules, "_mx_strict": strict}
    return type(base)(base.__name__, (_UnderRules, base), body)


class _UnderRules:
    """What a converted module does otherwise: in its class these come before the base's."""

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return _converted, (original(self), self._mx_rules, self._mx_strict)

    def bind(self: object, *args: object, **kwargs: object) -> Any:
        raise ValueError(
            f"convert.linen: {type(self).__name__}.bind would leave layers that are called past "
            "the module's own methods in high precision; use apply(variables, ..., method=lambda "
            "module, x: module.encoder(x)), or bind convert.original(module)"
        )

    def apply(self: Any, *args: object, **kwargs: Any) -> Any:
        # The method may be a function that calls submodules directly.
        called = kwargs.get("method") or "__call__"
        rngs = kwargs.get("rngs")
        streams = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        key = streams.get(RNG_STREAM, streams.get("params"))
        run = functools.partial(self._mx_base.apply, self)
        with _converting(self, (), whole=getattr(called, "__name__", called) == "__call__"):
            return _traced(self, run, args, kwargs, key, within="['params']")

    def init_with_output(self: Any, *args: object, **kwargs: Any) -> Any:
        run = functools.partial(self._mx_base.init_with_output, self)
        # It makes the parameters of all layers, whichever method it runs.
        with _converting(self, (), whole=True):
            # What it computes is thrown away; what rules say of it is asked where it matters.
            result = run(*args, **kwargs)
            _learn(self, run, args, kwargs)
            return result

    def _call_wrapped_method(self: Any, fun: Call, args: Args, kwargs: Kwargs) -> Any:
        """Flax's way into every method: also where the module is a part of another."""
        run = functools.partial(self._mx_base._call_wrapped_method, self, fun, args, kwargs)
        if self.scope is None:
            return run()
        with _converting(self, self.path, whole=fun.__name__ == "__call__") as begins:
            if not begins or fun.__name__ == "setup":
                return run()
            with decided():
                return _traced_part(self, fun, args, kwargs)


def _traced(self: Any, run: Call, args: Args, kwargs: Kwargs, key: Key = None, **options: Any):
    """A call of the module whose products are made anew, those of its layers apart."""
    rules = self._mx_rules
    if not any(rule.quantizes for rule in rules) and options.get("runs", True):
        result = run(*args, **kwargs)
        _learn(self, run, args, kwargs)
        return result
    _, modules = _known(self)
    return call_of_model(run, args, kwargs, rules=rules, modules=modules, key=key, **options)


def _learn(self: Any, run: Call, args: Args, kwargs: Kwargs) -> None:
    """Ask the rules about products that a call alone shows, if some matched no layer so far."""
    (recorder, *_) = recorders_of(self._mx_rules)
    found = Report(rules=self._mx_rules, decisions=recorder.decisions)
    if len(found.used | _known(self)[0]) < len(self._mx_rules):
        _traced(self, run, args, kwargs, runs=False)


def _traced_part(self: Any, fun: Call, args: Args, kwargs: Kwargs) -> Any:
    """As `_traced`, of a module in another, which is bound: its scope becomes an argument."""
    key = None
    draws = [own for rule in self._mx_rules if (own := rule.quantizes) and own.is_stochastic]
    if draws and (self.has_rng(RNG_STREAM) or self.has_rng("params")):
        key = layers.layer_key(self, draws[0])

    def lifted(method: Call, scope: Scope, *given: object) -> Any:
        def run(
            of: Call, repack: Call, variables: Variables, rngs: Variables, *given: object
        ) -> Any:
            def call(variables: Variables, rngs: Variables, *given: object) -> Any:
                scope = of(variables, rngs)
                return method(scope, *given), repack(scope)

            return _traced(self, call, (variables, rngs, *given), {}, key)

        return lift.pack(run, (True,), (True,), (True,))(scope, *given)

    def method(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        return module._call_wrapped_method(fun, args, kwargs)

    return lift_direct_transform(lifted, (method,), self, args, kwargs)


@contextlib.contextmanager
def _converting(module: Any, root: tuple[str, ...], *, whole: bool) -> Iterator[bool]:
    """Intercept methods below a module at a path, once however its methods nest."""
    # If the method meets the whole module, rules that matched no layer are warned of.
    rules = module._mx_rules
    active, conversion = _active.get(), (rules, root)
    if conversion in active:
        yield False
        return
    reported = any(recorder.reports for recorder in recorders_of(rules))
    token = _active.set((*active, conversion))
    try:
        own = functools.partial(_intercept, rules, root, module.name, _known(module)[1])
        with recorded(rules, reports=False) as recorder, nn.intercept_methods(own):
            yield True
    finally:
        _active.reset(token)
    # Not after an exception; and a report checks its rules itself.
    used, _ = _known(module)
    result = Report(rules=rules, decisions=recorder.decisions)
    if whole and not reported:
        result.check("convert.linen", module._mx_strict, used)
    used |= result.used


def _known(module: nn.Module) -> tuple[set[int], dict[str, Module]]:
    """Of earlier calls, since nn.jit keeps what it traced: rules that matched, modules by path."""
    try:
        return _known_of(module if module.scope is None else type(module))
    except TypeError:
        # A field that cannot be hashed.
        return _known_of(type(module))


@functools.lru_cache(maxsize=256)
def _known_of(model: object) -> tuple[set[int], dict[str, Module]]:
    return set(), {}


def decisions(
    module: nn.Module, rules: tuple[Rule, ...], *args: object, rngs: object = None, **kwargs: object
) -> tuple[Decision, ...]:
    """What rules say of a module's layers, from an abstract trace of its init."""
    converted: Any = linen(module, rules)
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout", RNG_STREAM)}
    with recorded(rules, reports=True) as recorder:
        # The parameters that init makes come of its keys alone.
        run = functools.partial(converted._mx_base.init_with_output, converted)
        with _converting(converted, (), whole=True):
            _traced(converted, run, (rngs, *args), kwargs, runs=False)
    return recorder.decisions


# Layers ------------------------------------------------------------------------------------------

# As an attention_fn takes them, whose attributes end in `_cls`.
_EINSUMS = tuple(slot.attribute.removesuffix("_cls") for slot in kinds.ATTENTION.linen)
# Methods below Flax's wrappers.
_ATTENTION_CALL = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)
_RECIPE_EINSUM: Any = inspect.unwrap(mx_linen.Einsum.__call__)


@contextlib.contextmanager
def overriding(layer: object, overrides: dict[str, Any]) -> Iterator[None]:
    """Override a layer's attributes for one call, past Flax's checks: no other thread has it."""
    own = vars(layer)
    before = {name: own[name] for name in overrides if name in own}
    for name, value in overrides.items():
        object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        for name in overrides:
            if name in before:
                object.__setattr__(layer, name, before[name])
            else:
                # A method of the class, which the override hid.
                object.__delattr__(layer, name)


@dataclasses.dataclass(frozen=True)
class BoundLayer:
    """One layer in one call: its path, and the rules to ask."""

    # Equal if rules and path are, so that a jit inside the layer finds what it compiled; with a
    # stochastic recipe never equal, because each call draws from its own scope.

    rules: tuple[Rule, ...]
    path: str
    call: object  # a fresh one with a stochastic recipe, else None
    layer: nn.Module = dataclasses.field(compare=False)

    def decide(self, product: str | None = None, **facts: Any) -> Decision:
        """The rules' decision about the layer, or one product of it; facts are `Layer`'s fields."""
        path = self.path if product is None else "/".join(filter(None, (self.path, product)))
        decision = decide(self.rules, Layer(path=path, type=type(self.layer), **facts))
        record(self.rules, decision)
        return decision

    def note(self, obstacle: str) -> None:
        """Record why no rule reaches the layer, in case nothing else is recorded of it."""
        for recorder in recorders_of(self.rules):
            layer = Layer(path=self.path, type=type(self.layer), obstacle=obstacle)
            recorder.bare.setdefault(self.path, layer)

    def key(self, recipe: Recipe) -> DerivedKey | None:
        """A key from the layer's stream, if the recipe draws random bits."""
        return layers.layer_key(self.layer, recipe, name=self.path or None)


def naming(decision: Decision) -> AbstractContextManager[None]:
    """Say in an error which layer and rule it comes from."""
    layer = decision.layer
    return layers.named_in_errors(
        f"{layer.path!r} ({layer.type.__name__}), converted by rule {decision.rule}"
    )


@dataclasses.dataclass(frozen=True)
class Product:
    """What a layer multiplies with in place of its own product, the default."""

    bound: BoundLayer
    kind: kinds.Kind
    default: Call

    def __call__(
        self, lhs: object, rhs: jax.Array | Quantized, *args: object, **options: object
    ) -> Any:
        """Ask the rules, then multiply with their recipe, or as the layer would have."""
        facts = self.kind.facts(self.bound.layer, tuple(rhs.shape), *args)
        decision = self.bound.decide(**facts)
        recipe = decision.recipe
        if recipe is None and isinstance(rhs, Quantized):
            # A stored kernel is what it is, and only the input is as it was.
            if self.kind.reads_stored:
                recipe = high_precision()
            else:
                rhs = rhs.dequantize()
        if recipe is None:
            with decided():
                return self.default(lhs, rhs, *args, **options)
        with naming(decision), decided():
            key = self.bound.key(recipe)
            if self.kind.rhs_is_kernel:
                recipe = layers.linen_recipe(self.bound.layer, recipe)
            else:
                recipe = layers.recipe_of(recipe, None)
            return self.kind.operation(recipe)(lhs, rhs, *args, **options, key=key)


@dataclasses.dataclass(frozen=True)
class AttentionProducts:
    """An attention function, Flax's or one that takes its einsums, whose products follow rules."""

    bound: BoundLayer
    attention_fn: Callable[..., jax.Array]

    @property
    def __signature__(self) -> inspect.Signature:
        # Flax leaves out what is not in it. Precision it refuses beside einsums: they have it.
        signature = inspect.signature(self.attention_fn)
        hidden = () if self.bound.layer.precision is None else ("precision",)  # pyright: ignore
        parameters = [p for p in signature.parameters.values() if p.name not in hidden]
        return signature.replace(parameters=parameters)

    def decide(self) -> dict[Any, Decision]:
        """The decision about each product."""
        facts = kinds.ATTENTION.facts(self.bound.layer, ())
        return {name: self.bound.decide(name, **facts) for name in kinds.ATTENTION.products}

    def __call__(self, *operands: object, **options: object) -> jax.Array:
        products = [functools.partial(self._product, *own) for own in self.decide().items()]
        return self.attention_fn(*operands, **options | dict(zip(_EINSUMS, products, strict=True)))

    def _product(self, name: str, decision: Decision, *operands: object) -> jax.Array:
        recipe = None if decision.recipe is None else layers.recipe_of(decision.recipe, None)
        key = None if recipe is None else self.bound.key(recipe)
        precision = self.bound.layer.precision  # pyright: ignore
        with decided(), contextlib.nullcontext() if recipe is None else naming(decision):
            return kinds.attention_einsum(name, recipe, precision, key)(*operands)


def _answer_einsum(
    bound: BoundLayer, call: Call, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    """flax.linen.Einsum: with a recipe, the method of mx_jax.nn.linen's runs in its place."""
    layer: Any = bound.layer
    subscripts = merge_param("einsum_str", layer.einsum_str, einsum_str)
    facts = kinds.EINSUM.facts(layer, tuple(layer.shape), subscripts)
    decision = bound.decide(**facts)
    recipe = decision.recipe
    kernel = layers.quantized_in(layer.get_variable("params", "kernel"))
    if recipe is None and facts["shape"] is not None and kernel is not None:
        # A stored kernel is what it is; only the input stays in high precision.
        recipe = high_precision()
    if recipe is None:
        return call(inputs, einsum_str)
    with naming(decision), overriding(layer, {"recipe": recipe} | _promotion(layer)):
        return _RECIPE_EINSUM(layer, inputs, einsum_str)


def _promotion(layer: object) -> dict[str, Any]:
    """Past Flax's own promote_dtype a stored kernel goes as it is."""
    is_flaxs = getattr(layer, "promote_dtype", None) is promote_dtype
    return {"promote_dtype": mx_linen.promote_operands} if is_flaxs else {}


def _answer_lookup(bound: BoundLayer, call: Call, inputs: jax.Array) -> jax.Array:
    """flax.linen.Embed: rows of the quantized table."""
    recipe = _decide_embed(bound).recipe
    layer: Any = bound.layer
    table = layers.quantized_in(layer.get_variable("params", "embedding"))
    if table is not None:
        # Only the rows that are asked for are decoded.
        dtype = layer.dtype or table.dtype
        return rows_of(table, jnp.asarray(inputs)).dequantize(dtype)
    if recipe is None:
        return call(inputs)
    key = bound.key(recipe)

    def promote(table: object, **options: object) -> list[Any]:
        return [kinds.cast_table(entry, recipe, key) for entry in layer_promote(table, **options)]

    layer_promote = layer.promote_dtype
    with overriding(layer, {"promote_dtype": promote}):
        return call(inputs)


def _answer_attend(bound: BoundLayer, call: Call, query: jax.Array) -> jax.Array:
    """flax.linen.Embed.attend: the query times the table, both along the features."""
    decision = _decide_embed(bound)
    recipe = decision.recipe
    layer: Any = bound.layer
    promote = layer.promote_dtype
    if layers.quantized_in(layer.get_variable("params", "embedding")) is not None:
        recipe, promote = recipe or high_precision(), mx_linen.promote_operands
    if recipe is None:
        return call(query)
    query, table = promote(query, layer.embedding, dtype=layer.dtype)
    dimensions = (((query.ndim - 1,), (1,)), ((), ()))
    with naming(decision):
        key = bound.key(recipe)
        recipe = layers.linen_recipe(layer, recipe, "embedding")
        return recipe.dot_general(query, table, dimensions, key=key)


def _decide_embed(bound: BoundLayer):
    layer: Any = bound.layer
    return bound.decide(**kinds.EMBED.facts(layer, (layer.num_embeddings, layer.features)))


# By the functions themselves, below Flax's wrappers: what an interceptor gets to see.
ANSWERS: dict[Any, Call] = {
    inspect.unwrap(nn.Einsum.__call__): _answer_einsum,
    inspect.unwrap(nn.Embed.__call__): _answer_lookup,
    inspect.unwrap(nn.Embed.attend): _answer_attend,
}


def _cache_overrides(
    bound: BoundLayer, method: object, overrides: dict[str, Any]
) -> dict[str, Any]:
    """What else to set on an attention while it decodes, by a rule with a cache."""
    layer: Any = bound.layer
    if method is not _ATTENTION_CALL or all(rule.cache is None for rule in bound.rules):
        return {}
    own = overrides.get("attention_fn", layer.attention_fn)
    obstacle = None
    if not layer.decode:
        obstacle = "decode=False"
    elif "mask" not in inspect.signature(own).parameters:
        obstacle = "its attention_fn takes no mask"
    format = bound.decide("cache", is_cache=True, obstacle=obstacle).cache
    if format is None:
        return {}
    names = ("cached_key", "cached_value", "cache_index")

    def get(keys: jax.Array) -> Sequence[Any] | None:
        started = layer.has_variable("cache", "cached_key")
        empty = functools.partial(format.empty, keys.shape, keys.dtype)
        first = (lambda: empty().keys, lambda: empty().values, lambda: jnp.array(0, jnp.int32))
        # The variables that Flax's attention would have.
        kept = [layer.variable("cache", *new) for new in zip(names, first, strict=True)]
        return [variable.value for variable in kept] if started else None

    def put(*new: object) -> None:
        for name, value in zip(names, new, strict=True):
            layer.put_variable("cache", name, value)

    def is_flaxs() -> bool:
        if not isinstance(own, AttentionProducts):
            return own is nn.dot_product_attention
        recipes = (found.recipe for found in own.decide().values())
        return own.attention_fn is nn.dot_product_attention and not any(recipes)

    cached = CachedAttention(format=format, attention_fn=own, get=get, set=put, is_flaxs=is_flaxs)
    return {"decode": False, "attention_fn": cached}


def _intercept(
    rules: tuple[Rule, ...],
    root: tuple[str, ...],
    name: str | None,
    modules: dict[str, Module],
    call: Call,
    args: Args,
    kwargs: Kwargs,
    context: InterceptorContext,
) -> Any:
    """Run a method of a module below a root, which has a name, with what the rules say of it."""
    layer, scope = context.module, context.module.scope
    if scope is None or layer.path[: len(root)] != root:
        return call(*args, **kwargs)
    path = "/".join(layer.path[len(root) :])
    if not path and layer.name != name:
        # A submodule that the model applies to parameters of its own making has no path.
        path = layer.name or ""
    _mark(scope, hash(rules))
    modules[path] = Module(getattr(type(layer), "_mx_base", type(layer)))
    with contextlib.ExitStack() as stack:
        if not isinstance(layer, mx_linen.StoredParams):
            # A `param` that takes quantized weights, for whatever module is not ours.
            own = functools.partial(type(layer).param, layer)
            param = functools.partial(layers.stored_param, layer, own)
            stack.enter_context(overriding(layer, {"param": param}))
        if tracing.value == rules:
            stack.enter_context(in_module(path))
        if context.method_name == "setup":
            return call(*args, **kwargs)
        draws = any(rule.quantizes and rule.quantizes.is_stochastic for rule in rules)
        bound = BoundLayer(rules, path, object() if draws else None, layer)
        method = getattr(context.orig_method, "func", None)
        overrides = None
        if method not in ANSWERS:
            overrides = _overrides(bound)
            cached = _cache_overrides(bound, method, overrides or {})
            stack.enter_context(overriding(layer, (overrides or {}) | cached))
        if method in ANSWERS or overrides == {}:
            stack.enter_context(decided())
        answer = functools.partial(ANSWERS[method], bound, call) if method in ANSWERS else call
        return answer(*args, **kwargs)


def _mark(scope: Scope, rules: int) -> None:
    """Mark a scope, and those that it makes, for nn.jit as unlike any other."""
    # nn.jit compiles once for equal modules, wherever they are, but rules go by path. Its key has
    # the scope's flags, and interceptors see a module below nn.jit only while it is traced.
    scope.flags = freeze({**scope.flags, "mx_jax": (rules, *scope.path)})
    # A strong reference would be a cycle, which keeps a model's variables until it is collected.
    reference = weakref.ref(scope)

    def push(*args: Any, **kwargs: Any) -> Scope:
        parent = reference()
        assert parent is not None
        child = Scope.push(parent, *args, **kwargs)
        _mark(child, rules)
        return child

    vars(scope)["push"] = push


def _overrides(bound: BoundLayer) -> dict[str, Any] | None:
    """What to set on a layer while it runs; None if it has no attribute for a product."""
    layer: Any = bound.layer
    if isinstance(layer, mx_linen.Operation):
        # Part of the layer that holds it, which is noted.
        return {}
    if isinstance(getattr(layer, "recipe", None), Recipe):
        bound.note("has its own recipe")
        return {}
    kind = kinds.kind_of(layer)
    if kind is None:
        return None
    if kind is kinds.ATTENTION:
        own = layer.attention_fn
        own = own.attention_fn if isinstance(own, AttentionProducts) else own
        takes_einsums = {*_EINSUMS} <= inspect.signature(own).parameters.keys()
        if not takes_einsums or any(slot.obstacle(layer, ()) for slot in kind.linen):
            return None
        return {"attention_fn": AttentionProducts(bound, own)}
    (slot,) = kind.linen
    obstacle = slot.obstacle(layer, Product)
    if obstacle is not None:
        bound.note(obstacle)
        return {}
    return {slot.attribute: Product(bound, kind, slot.defaults[-1])} | _promotion(layer)
