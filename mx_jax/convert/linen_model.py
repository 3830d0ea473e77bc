"""flax.linen: an unmodified module as one whose layers follow rules."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

from mx_jax.convert.functions import call_of_model
from mx_jax.convert.jaxpr import Module, decided
from mx_jax.convert.linen_layers import Interceptor
from mx_jax.convert.report import Report, recorded, recorders_of
from mx_jax.convert.rules import Decision, Rule, as_rules
from mx_jax.nn.linen import RNG_STREAM
from mx_jax.nn.randomness import layer_key

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
    module = original(module)
    return _converted(module, as_rules(rules, "convert.linen"), strict)


def refuse_wrapper(model: Any, operation: str) -> None:
    """Raise TypeError for what holds a flax.linen module, and say what to convert.

    As transformers' `FlaxPreTrainedModel`, which reads `module` and stores `_module`.
    """
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
    """A subclass that runs its methods under rules.

    One for each combination, so that equal modules have one class, which is what Flax compares. It
    keeps the name: Flax names submodules after it.
    """
    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        # Otherwise the subclass would be given new ones in place of the user's.
        "__eq__": base.__eq__,
        "__hash__": base.__hash__,
        "__reduce__": nn.nowrap(_reduce),
        "_mx_base": base,
        "_mx_rules": rules,
        "_mx_strict": strict,
        "_call_wrapped_method": nn.nowrap(_call_wrapped_method),
        "apply": nn.nowrap(_under_rules("apply")),
        "init_with_output": nn.nowrap(_under_rules("init_with_output")),
        "bind": nn.nowrap(_bind),
    }
    return type(base)(base.__name__, (base,), body)


def _reduce(self: Any) -> tuple[Any, ...]:
    return _converted, (original(self), self._mx_rules, self._mx_strict)


def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
    """Flax's way into every method: also where the module is a part of another."""
    run = functools.partial(self._mx_base._call_wrapped_method, self, fun, args, kwargs)
    if self.scope is None:
        return run()
    with _converting(self, self.path, whole=fun.__name__ == "__call__") as begins:
        if not begins or fun.__name__ == "setup":
            return run()
        with decided():
            return _traced_part(self, fun, args, kwargs)


def _under_rules(name: str):
    """`apply` and the like: the method they are given may call submodules directly."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = kwargs.get("method") or "__call__"
        # init makes the parameters of all layers, whichever method it runs.
        whole = name != "apply" or getattr(called, "__name__", called) == "__call__"
        run = functools.partial(getattr(self._mx_base, name), self)
        with _converting(self, (), whole=whole):
            if name == "apply":
                rngs = kwargs.get("rngs")
                streams = rngs if isinstance(rngs, Mapping) else {"params": rngs}
                key = streams.get(RNG_STREAM, streams.get("params"))
                return _traced(self, *_with_weights(run, *args, **kwargs), key)
            # What init computes is thrown away; what rules say of it is asked where it matters.
            result = run(*args, **kwargs)
            (record, *_) = recorders_of(self._mx_rules)
            if {*Report(rules=record.rules, decisions=record.decisions).unused} - _known(self).used:
                _traced(self, run, args, kwargs, runs=False)
            return result

    method.__name__ = name
    return method


def _with_weights(
    run: Any, variables: Any, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """An `apply` whose first argument are the parameters alone, and its arguments."""
    others = dict(variables)
    params = {"params": others.pop("params")} if "params" in others else {}

    def call(params: Any, others: Any, *args: Any, **kwargs: Any) -> Any:
        return run({**params, **others}, *args, **kwargs)

    return call, (params, others, *args), kwargs


def _traced(
    self: Any, run: Any, args: Any, kwargs: Any, key: jax.Array | None = None, runs: bool = True
) -> Any:
    """A call of the module whose products are made anew, those of its layers apart."""
    rules = self._mx_rules
    if not any(rule.quantizes for rule in rules) and runs:
        return run(*args, **kwargs)

    def tell(decisions: tuple[Decision, ...]) -> None:
        for record in recorders_of(rules):
            for decision in decisions:
                record.add(decision)

    return call_of_model(
        run,
        args,
        kwargs,
        rules=rules,
        modules=_known(self).modules,
        key=key,
        tell=tell,
        runs=runs,
    )


def _traced_part(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
    """As `_traced`, of a module in another, which is bound: its scope becomes an argument."""
    key = None
    draws = [own for rule in self._mx_rules if (own := rule.quantizes) and own.is_stochastic]
    if draws and (self.has_rng(RNG_STREAM) or self.has_rng("params")):
        key = layer_key(self, draws[0])

    def lifted(method: Any, scope: Any, *given: Any) -> Any:
        def run(scope_of: Any, repack: Any, variables: Any, rngs: Any, *given: Any) -> Any:
            def call(variables: Any, rngs: Any, *given: Any) -> Any:
                scope = scope_of(variables, rngs)
                return method(scope, *given), repack(scope)

            return _traced(self, call, (variables, rngs, *given), {}, key)

        return lift.pack(run, (True,), (True,), (True,))(scope, *given)

    def method(module: Any, args: Any, kwargs: Any) -> Any:
        return module._call_wrapped_method(fun, args, kwargs)

    return lift_direct_transform(lifted, (method,), self, args, kwargs)


def _bind(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"convert.linen: {type(self).__name__}.bind would leave layers that are called past the "
        "module's own methods in high precision; use apply(variables, ..., method=lambda module, "
        "x: module.encoder(x)), or bind convert.original(module)"
    )


@contextlib.contextmanager
def _converting(module: Any, root: tuple[str, ...], *, whole: bool) -> Iterator[bool]:
    """Intercept methods below a module at a path, once however its methods nest.

    If the method meets the whole module, rules that matched no layer are warned of.
    """
    rules = module._mx_rules
    active, conversion = _active.get(), (rules, root)
    if conversion in active:
        yield False
        return
    reported = any(record.reports for record in recorders_of(rules))
    token = _active.set((*active, conversion))
    try:
        meeting = Interceptor(rules, root, module.name, _known(module).modules)
        intercepting = nn.intercept_methods(meeting)
        with recorded(rules, reports=False) as record, intercepting:
            yield True
    finally:
        _active.reset(token)
    # Not after an exception; and a report tells of its rules itself.
    used = _known(module).used
    result = Report(rules=rules, decisions=record.decisions)
    if whole and not reported:
        result.check("convert.linen", module._mx_strict, used)
    used |= set(range(len(rules))) - set(result.unused)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a model from earlier calls: nn.jit keeps what it traced.

    Attributes:
      used: rules that matched; a mode has layers of its own.
      modules: by path.
    """

    used: set[int] = dataclasses.field(default_factory=set[int])
    modules: dict[str, Module] = dataclasses.field(default_factory=dict[str, Module])


def _known(module: Any) -> _Known:
    try:
        return _known_of(module if module.scope is None else type(module))
    except TypeError:
        # A field that cannot be hashed.
        return _known_of(type(module))


@functools.lru_cache(maxsize=256)
def _known_of(model: Any) -> _Known:
    return _Known()


def decisions(
    module: nn.Module, rules: tuple[Rule, ...], *args: Any, rngs: Any = None, **kwargs: Any
) -> tuple[Decision, ...]:
    """What rules say of a module's layers, from an abstract trace of its init."""
    converted: Any = linen(module, rules)
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout", RNG_STREAM)}
    with recorded(rules, reports=True) as record:
        # The parameters that init makes come of its keys alone.
        run = functools.partial(converted._mx_base.init_with_output, converted)
        with _converting(converted, (), whole=True):
            _traced(converted, run, (rngs, *args), kwargs, runs=False)
    return record.decisions
