"""flax.linen: an unmodified module as one whose products follow rules.

Its call is traced, and what it multiplies is made anew in the jaxpr, as `convert.function` does it.
An interceptor of Flax's sees what a trace does not show: modules, their classes and paths.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import freeze
from flax.linen.module import InterceptorContext

from mx_jax.convert.functions import traced_call
from mx_jax.convert.jaxpr import Module, in_module, tracing
from mx_jax.convert.products import users_choice
from mx_jax.convert.rules import Decision, Report, Rule, as_rules
from mx_jax.nn import linen as mx_linen
from mx_jax.nn.linen import RNG_STREAM

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def linen(
    module: "nn.Module | ConvertedModule", rules: Rule | Sequence[Rule], *, strict: bool = False
) -> "ConvertedModule":
    """A module whose layers follow rules: same parameters, same names, same methods.

    Its `init` and `apply` are the module's, and what `apply` multiplies is made anew in its jaxpr,
    as by `convert.function`. Nothing is stored, neither in the module nor in its variables, so
    checkpoints go both ways and `original` takes the conversion back. Equal modules with equal
    rules are equal: a rebuilt model does not retrace. Stochastic recipes draw from the stream
    `"quantize"`.

    A linen module has no layers before it runs: a warning of rules that match nothing comes at the
    end of `init`, and of an `apply` of `__call__`, unless they matched before.

    Args:
      module: an unbound module; a converted one gets the new rules instead of its old.
      rules: the first that matches a layer decides; see `Rule`.
      strict: whether a rule that matched nothing is an error instead of an `UnusedRuleWarning`.

    Returns:
      A wrapper with the module's attributes, `init`, `apply` and `clone`. It cannot be a part of
      another module: convert the whole, with rules for the part. `bind` is not offered: layers
      called past the module's own methods would silently stay in high precision.

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
    module = original(module)
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
    return ConvertedModule(module, as_rules(rules, "convert.linen"), strict)


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


def original(module: object) -> Any:
    """The module that was converted; one that was not, as it is."""
    return module.module if isinstance(module, ConvertedModule) else module


@dataclasses.dataclass(frozen=True)
class ConvertedModule:
    """The result of `convert.linen`, with its arguments. Other attributes are the module's."""

    module: nn.Module
    rules: tuple[Rule, ...]
    strict: bool = False

    # Rules that matched something so far.
    _used: set[int] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=set[int]
    )

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):
            # A copy that is being made has none yet.
            raise AttributeError(name)
        return getattr(self.module, name)

    def clone(self, **options: Any) -> "ConvertedModule":
        """As `flax.linen.Module.clone`."""
        return dataclasses.replace(self, module=self.module.clone(**options))

    def copy(self, **options: Any) -> "ConvertedModule":
        """As `flax.linen.Module.copy`."""
        return dataclasses.replace(self, module=self.module.copy(**options))

    def bind(self, *args: object, **kwargs: object) -> Any:
        """Raise ValueError."""
        raise ValueError(
            f"convert.linen: {type(self.module).__name__}.bind would leave layers that are called "
            "past the module's own methods in high precision; use apply(variables, ..., "
            "method=lambda module, x: module.encoder(x)), or bind convert.original(module)"
        )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise ValueError(
            f"convert.linen: {type(self.module).__name__} is called by init and apply, not as a "
            "part of another module; convert the whole model, with rules for the part"
        )

    def init(self, *args: object, **kwargs: Any) -> Any:
        """As `flax.linen.Module.init`."""
        return self.init_with_output(*args, **kwargs)[1]

    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        """As `flax.linen.Module.init_with_output`."""
        scopes, run, shown = _Scopes(self.module, self.rules), self.module.init_with_output, ()
        with nn.intercept_methods(scopes):
            # What it computes is thrown away, so its products stay as they are.
            result = run(*args, **kwargs)
            if len(self._used) < len(self.rules):
                shown, _ = traced_call(run, args, kwargs, self.rules, scopes.modules)
        # It makes the parameters of all layers, whichever method it runs.
        report = Report(rules=self.rules, decisions=shown)
        report.check("convert.linen", self.strict, self._used)
        return result

    def apply(self, *args: object, **kwargs: Any) -> Any:
        """As `flax.linen.Module.apply`."""
        rngs = kwargs.get("rngs")
        streams = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        key = streams.get(RNG_STREAM, streams.get("params"))
        scopes, run = _Scopes(self.module, self.rules), self.module.apply
        with nn.intercept_methods(scopes):
            shown, by_key = traced_call(run, args, kwargs, self.rules, scopes.modules, "['params']")
            result = by_key(key)
        # The method may be a function that calls submodules directly.
        called = kwargs.get("method") or "__call__"
        report = Report(rules=self.rules, decisions=shown)
        if getattr(called, "__name__", called) == "__call__":
            report.check("convert.linen", self.strict, self._used)
        self._used.update(report.used)
        return result


def decisions(
    module: nn.Module | ConvertedModule,
    rules: tuple[Rule, ...],
    *args: object,
    rngs: object = None,
    **kwargs: object,
) -> tuple[Decision, ...]:
    """What rules say of a module's layers, from an abstract trace of its init."""
    module = linen(module, rules).module
    if rngs is None:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout", RNG_STREAM)}
    scopes = _Scopes(module, rules)
    with nn.intercept_methods(scopes):
        # The parameters that init makes come of its keys alone.
        run = module.init_with_output
        return traced_call(run, (rngs, *args), kwargs, rules, scopes.modules)[0]


# Modules -----------------------------------------------------------------------------------------


class _Anew:
    """A flag of scopes by which nn.jit traces each module anew."""

    # It compiles once for equal modules, wherever they are, but rules go by path. Its key has the
    # hash of the flags.

    def __hash__(self) -> int:
        return next(_numbers)


_numbers = itertools.count()


class _Scopes:
    """An interceptor of Flax's for one call of a converted module. It describes the modules in it,
    by path, and puts their products in scopes of their names. It changes a call only for parameters
    that are codes."""

    def __init__(self, module: nn.Module, rules: tuple[Rule, ...]):
        self.rules, self.name = rules, module.name
        self.gathers = any(rule.quantizes and rule.quantizes.gather for rule in rules)
        self.modules: dict[str, Module] = {}

    def __call__(self, call: Call, args: Args, kwargs: Kwargs, context: InterceptorContext) -> Any:
        layer, scope = context.module, context.module.scope
        if scope is None:
            return call(*args, **kwargs)
        path = "/".join(layer.path)
        if not path and layer.name != self.name:
            # A submodule that the model applies to parameters of its own making has no path.
            path = layer.name or ""
        scope.flags = freeze({**scope.flags, "mx_jax": _ANEW})
        with contextlib.ExitStack() as stack:
            if context.method_name != "setup":
                if path not in self.modules:
                    self.modules[path] = self._described(layer)
                if tracing.value == self.rules:
                    stack.enter_context(in_module(path))
            if not isinstance(layer, mx_linen.StoredParams):
                stack.enter_context(_storing(layer))
            return call(*args, **kwargs)

    def _described(self, layer: nn.Module) -> Module:
        name = "embedding" if isinstance(layer, nn.Embed) else "kernel"
        spec = mx_linen.linen_spec(layer, name) if self.gathers else None
        return Module(type(layer), obstacle=users_choice(layer), spec=spec)


_ANEW = _Anew()


@contextlib.contextmanager
def _storing(layer: nn.Module) -> Iterator[None]:
    """Have `param` of a module that is not ours take quantized weights, for one call."""
    # Past Flax's checks: no other thread has the module.
    before = vars(layer).get("param")
    param = functools.partial(type(layer).param, layer)
    object.__setattr__(layer, "param", functools.partial(mx_linen.stored_param, layer, param))
    try:
        yield
    finally:
        if before is None:
            # A method of the class, which was hidden.
            object.__delattr__(layer, "param")
        else:
            object.__setattr__(layer, "param", before)
