"""flax.linen: an unmodified module as one whose products follow rules.

Its call is traced, and what it multiplies is made anew in the jaxpr, as `convert.function` does it.
What rules know of modules, which a trace does not show, an interceptor of Flax's sees.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import Scope, freeze, lift
from flax.linen.module import InterceptorContext
from flax.linen.transforms import lift_direct_transform
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes
from mx_jax.convert.caches import CachedAttention
from mx_jax.convert.flax_layers import users_choice
from mx_jax.convert.functions import call_of_model
from mx_jax.convert.jaxpr import Module, decided, in_module, tracing
from mx_jax.convert.rules import (
    Decision,
    Layer,
    Report,
    Rule,
    as_rules,
    decide,
)
from mx_jax.nn import layers
from mx_jax.nn import linen as mx_linen
from mx_jax.nn.linen import RNG_STREAM
from mx_jax.ops.arguments import Key

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
        with _converting(self, (), whole=getattr(called, "__name__", called) == "__call__") as seen:
            return _traced(self, seen, run, args, kwargs, key, within="['params']")

    def init_with_output(self: Any, *args: object, **kwargs: Any) -> Any:
        run = functools.partial(self._mx_base.init_with_output, self)
        # It makes the parameters of all layers, whichever method it runs.
        with _converting(self, (), whole=True) as seen:
            # What it computes is thrown away; what rules say of it is asked where it matters.
            result = run(*args, **kwargs)
            found = Report(rules=self._mx_rules, decisions=seen.decisions)
            if len(found.used | _used(self)) < len(self._mx_rules):
                _traced(self, seen, run, args, kwargs, runs=False)
            return result

    def _call_wrapped_method(self: Any, fun: Call, args: Args, kwargs: Kwargs) -> Any:
        """Flax's way into every method: also where the module is a part of another."""
        run = functools.partial(self._mx_base._call_wrapped_method, self, fun, args, kwargs)
        if self.scope is None:
            return run()
        with _converting(self, self.path, whole=fun.__name__ == "__call__") as seen:
            if seen is None or fun.__name__ == "setup":
                return run()
            with decided():
                return _traced_part(self, seen, fun, args, kwargs)


def _traced(
    self: Any, seen: "_Seen", run: Call, args: Args, kwargs: Kwargs, key: Key = None, **options: Any
) -> Any:
    """A call of the module whose products are made anew."""
    options |= {"rules": self._mx_rules, "modules": seen.modules, "callback": seen.learn}
    return call_of_model(run, args, kwargs, key=key, **options)


def _traced_part(self: Any, seen: "_Seen", fun: Call, args: Args, kwargs: Kwargs) -> Any:
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

            return _traced(self, seen, call, (variables, rngs, *given), {}, key)

        return lift.pack(run, (True,), (True,), (True,))(scope, *given)

    def method(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        return module._call_wrapped_method(fun, args, kwargs)

    return lift_direct_transform(lifted, (method,), self, args, kwargs)


@contextlib.contextmanager
def _converting(module: Any, root: tuple[str, ...], *, whole: bool) -> Iterator[Any]:
    """See modules below a module at a path, once however its methods nest: `_Seen`, then None."""
    # If the method meets the whole module, rules that matched no layer are warned of.
    rules = module._mx_rules
    active, conversion = _active.get(), (rules, root)
    if conversion in active:
        yield None
        return
    token = _active.set((*active, conversion))
    seen = _Seen(rules, root, module.name)
    try:
        with nn.intercept_methods(seen):
            yield seen
    finally:
        _active.reset(token)
    # Not after an exception.
    result, used = Report(rules=rules, decisions=seen.decisions), _used(module)
    if whole:
        result.check("convert.linen", module._mx_strict, used)
    used |= result.used


def _used(module: nn.Module) -> set[int]:
    """Rules that matched in earlier calls."""
    try:
        return _used_of(module if module.scope is None else type(module))
    except TypeError:
        # A field that cannot be hashed.
        return _used_of(type(module))


@functools.lru_cache(maxsize=256)
def _used_of(model: object) -> set[int]:
    return set()


def decisions(
    module: nn.Module, rules: tuple[Rule, ...], *args: object, rngs: object = None, **kwargs: object
) -> tuple[Decision, ...]:
    """What rules say of a module's layers, from an abstract trace of its init."""
    converted: Any = linen(module, rules)
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout", RNG_STREAM)}
    # The parameters that init makes come of its keys alone.
    run = functools.partial(converted._mx_base.init_with_output, converted)
    with _converting(converted, (), whole=False) as seen:
        _traced(converted, seen, run, (rngs, *args), kwargs, runs=False)
    return seen.decisions


# Modules -----------------------------------------------------------------------------------------

# A method below Flax's wrappers.
_ATTENTION_CALL = inspect.unwrap(nn.MultiHeadDotProductAttention.__call__)


class _Anew:
    """A flag of scopes by which nn.jit traces each module anew."""

    # It compiles once for equal modules, wherever they are, but rules go by path. Its key has the
    # hash of the flags.

    def __hash__(self) -> int:
        return next(_numbers)


_numbers = itertools.count()


class _Seen:
    """What an interceptor sees in one call of a converted module: the modules below a root, by
    path, whose products stand in scopes of their names. It changes a call only for what is stored:
    parameters that are codes, and caches."""

    def __init__(self, rules: tuple[Rule, ...], root: tuple[str, ...], name: str | None):
        self.rules, self.root, self.name = rules, root, name
        self.gathers = any(rule.quantizes and rule.quantizes.gather for rule in rules)
        self.modules: dict[str, Module] = {}
        # In the order of the trace, each once; and layers that no rule could reach, in case nothing
        # else is said of them.
        self.decided: dict[Any, Decision] = {}
        self.bare: dict[str, Layer] = {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the rules say of the layers that were met."""
        known = {path for path, _ in self.decided}
        bare = [layer for path, layer in self.bare.items() if path not in known]
        return (*self.decided.values(), *(decide((), layer) for layer in bare))

    def learn(self, decisions: Sequence[Decision]) -> None:
        """Keep what the rules say of layers."""
        for own in decisions:
            self.decided.setdefault((own.layer.path, own.layer.kernel), own)

    def __call__(self, call: Call, args: Args, kwargs: Kwargs, context: InterceptorContext) -> Any:
        layer, scope = context.module, context.module.scope
        if scope is None or layer.path[: len(self.root)] != self.root:
            return call(*args, **kwargs)
        path = "/".join(layer.path[len(self.root) :])
        if not path and layer.name != self.name:
            # A submodule that the model applies to parameters of its own making has no path.
            path = layer.name or ""
        scope.flags = freeze({**scope.flags, "mx_jax": _ANEW})
        overrides = {}
        if not isinstance(layer, mx_linen.StoredParams):
            # A `param` that takes quantized weights, for whatever module is not ours.
            own = functools.partial(type(layer).param, layer)
            overrides = {"param": functools.partial(layers.stored_param, layer, own)}
        with contextlib.ExitStack() as stack:
            if context.method_name != "setup":
                if path not in self.modules:
                    self.modules[path] = self._described(layer, path)
                if tracing.value == self.rules:
                    stack.enter_context(in_module(path))
                overrides |= self._cache(layer, path, getattr(context.orig_method, "func", None))
            stack.enter_context(overriding(layer, overrides))
            return call(*args, **kwargs)

    def _described(self, layer: nn.Module, path: str) -> Module:
        cls = getattr(type(layer), "_mx_base", type(layer))
        if isinstance(layer, nn.Embed):
            kernel = (layer.num_embeddings, layer.features)
            facts = {"kernel": kernel, "shape": kernel[::-1], "named_only": True}
            facts["axes"] = Axes.ordered()
            return Module(cls, facts=facts, spec=self._spec(layer, "embedding"))
        obstacle = users_choice(layer)
        if isinstance(layer, mx_linen.Operation):
            obstacle = "has its own recipe"
        if obstacle is None:
            return Module(cls, spec=self._spec(layer, "kernel"))
        if not isinstance(layer, mx_linen.Operation):
            self.bare[path] = Layer(path=path, type=cls, obstacle=obstacle)
        return Module(cls, facts={"obstacle": obstacle})

    def _spec(self, layer: nn.Module, name: str) -> PartitionSpec | None:
        return layers.linen_spec(layer, name) if self.gathers else None

    def _cache(self, layer: Any, path: str, method: object) -> dict[str, Any]:
        """What to set on an attention while it decodes, by a rule with a cache."""
        if method is not _ATTENTION_CALL or all(rule.cache is None for rule in self.rules):
            return {}
        obstacle = None
        if not layer.decode:
            obstacle = "decode=False"
        elif "mask" not in inspect.signature(layer.attention_fn).parameters:
            obstacle = "its attention_fn takes no mask"
        cls = getattr(type(layer), "_mx_base", type(layer))

        def decide_on(name: str, **facts: Any) -> Decision:
            own = "/".join(filter(None, (path, name)))
            return decide(self.rules, Layer(path=own, type=cls, **facts))

        decision = decide_on("cache", is_cache=True, obstacle=obstacle)
        self.learn([decision])
        format = decision.cache
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
            products = [decide_on(name, of_activations=True) for name in ("qk", "av")]
            self.learn(products)
            plain = layer.qk_attn_weights_einsum_cls is layer.attn_weights_value_einsum_cls is None
            return plain and own is nn.dot_product_attention and not any(d.recipe for d in products)

        own = layer.attention_fn
        cached = CachedAttention(
            format=format, attention_fn=own, get=get, set=put, is_flaxs=is_flaxs
        )
        return {"decode": False, "attention_fn": cached}


_ANEW = _Anew()


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
