"""Functions whose products follow rules: rewritten, and then differentiated."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from mx_jax.convert import jaxpr
from mx_jax.convert.products import OPERATIONS
from mx_jax.convert.rules import Decision, Layer, Report, Rule, as_rules, decide
from mx_jax.jaxpr import read
from mx_jax.jaxpr.rewrite import Plan, Rewritten
from mx_jax.nn.layers import RNG_STREAM
from mx_jax.ops.arguments import Key

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Positions and names of arguments.
Arguments = tuple[int | str, ...]
# A call's `rngs` with a key for rounding, in errors.
_KEY = f"{{{RNG_STREAM!r}: key}}"


def function(
    fn: Callable[P, R],
    rules: Rule | Sequence[Rule],
    *,
    weights: int | str | Sequence[int | str] = (),
    strict: bool = False,
) -> "ConvertedFunction[P, R]":
    """A function whose products follow rules, by the `jax.named_scope`s they stand in.

    It is traced when it is called, and each `dot_general` that a rule matches (matmul, einsum,
    `@`), each `ragged_dot`, and each convolution that a rule names by `types=convert.Conv`, is
    made by the rule's recipe, those in scan, while, cond, jit, checkpoint and shard_map too. Then
    it is differentiated: `jax.grad(convert.function(loss, rules))` gives the recipe's gradients.
    Bodies of custom_vjp and custom_jvp stay as they are, and so do gradients taken inside `fn`;
    `convert.report` names them.

    A call is traced and compiled as `jax.jit` does it, once for all arrays of equal shapes; what
    is no array stays what it is, flags and strings among them, and a new value is a new trace.

    Args:
      fn: a pure function of pytrees. It is called with tracers.
      rules: the first that matches a product decides; see `Rule`. A path joins the names of the
        scopes by `/`; where several products share a scope, `scope/dot_general_1` is the second.
        If the kernel comes from one weight, its path in the argument matches too, `"up/kernel"`,
        and that of the node that holds it, `"up"`. A node that can be called, such as a layer of
        Equinox, is what the product is reported by, and its class what `types` sees.
      weights: positions or names of the arguments that hold weights, `0` for `loss(params, x)`.
        The kernel of a product is the operand that comes from these, or from what the function
        closes over, alone. If that is neither or both of them, it is the right operand.
      strict: whether a rule that matched nothing is an error instead of an `UnusedRuleWarning`.

    Returns:
      A function of the same arguments, and of `rngs={"quantize": key}` for recipes that draw random
      bits: each product draws from a key of its own, in loops a new one in each iteration. A
      function that has an argument `rngs` itself, such as flax.linen's `apply`, is given it too.

    Raises:
      TypeError: not a function, or not rules.
      ValueError: when called: no key, and a forward product draws; with strict, a rule that matched
        nothing.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> def loss(params, x):
      ...     with jax.named_scope("up"):
      ...         x = jnp.tanh(x @ params["up"])
      ...     with jax.named_scope("head"):
      ...         return jnp.sum(x @ params["head"])
      >>> params = {"up": jnp.ones((64, 32)), "head": jnp.ones((32, 10))}
      >>> x = jnp.ones((4, 64))
      >>> rules = convert.Rule("up", "mxfp8")
      >>> print(convert.report(loss, rules, params, x))
      layer  type        kernel         rule  recipe
      up     DotGeneral  4x64 by 64x32  0     mxfp8
      head   DotGeneral  4x32 by 32x10  -     (no rule matches)
      1 of 2 layers converted
      >>> gradients = jax.grad(convert.function(loss, rules, weights=0))(params, x)
      >>> gradients["head"].shape
      (32, 10)
    """
    if not callable(fn):
        raise TypeError(
            f"convert.function: needs a function, got {type(fn).__name__}; use convert.function of "
            "the loss that calls it, with weights=0"
        )
    fn = fn.function if isinstance(fn, ConvertedFunction) else fn
    named = (weights,) if isinstance(weights, int | str) else tuple(weights)
    return ConvertedFunction(fn, as_rules(rules, "convert.function"), named, strict)


@dataclasses.dataclass(frozen=True)
class ConvertedFunction(Generic[P, R]):
    """The result of `convert.function`, with its arguments; equal ones are equal to jit."""

    function: Callable[P, R]
    rules: tuple[Rule, ...]
    weights: Arguments = ()
    strict: bool = False

    # Rules that matched something so far.
    _used: set[int] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=set[int]
    )

    def __post_init__(self):
        # As functools.wraps does it, for jit's names and for signatures.
        names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(self.function, name)]
        vars(self).update({name: getattr(self.function, name) for name in names})
        vars(self).update(__wrapped__=self.function)

    @functools.cached_property
    def _compiled(self) -> Any:
        # Of this object alone, so that what the function closes over goes when it goes.
        def run(static: "_Static", arrays: list[Any], key: Key) -> R:
            plan, decisions, by_plan = _traced(self.function, self.rules, static, arrays)
            report = Report(rules=self.rules, decisions=decisions)
            report.check("convert.function", self.strict, self._used)
            _check_key(key, plan, f"call {_name_of(self.function)}(..., rngs={_KEY})")
            return by_plan(arrays, key)

        run.__name__ = run.__qualname__ = _name_of(self.function)
        return jax.jit(run, static_argnums=0)

    def __reduce__(self):
        return type(self), (self.function, self.rules, self.weights, self.strict)

    def __call__(self, *args: object, **kwargs: object) -> R:
        key = _stream_key(self.function, kwargs)
        static, arrays = _split(self.function, self.weights, args, kwargs)
        try:
            hash(static)
        except TypeError:
            # Nothing is known of it at the next call.
            return jax.jit(functools.partial(self._compiled.__wrapped__, static))(arrays, key)
        return self._compiled(static, arrays, key)


def decisions(
    fn: Callable[..., Any],
    rules: tuple[Rule, ...],
    *args: object,
    weights: int | str | Sequence[int | str] = (),
    **kwargs: object,
) -> tuple[Decision, ...]:
    """What rules say of a function's products, from an abstract trace of a call."""
    converted = function(fn, rules, weights=weights)
    _stream_key(converted.function, kwargs)
    static, arrays = _split(converted.function, converted.weights, args, kwargs)
    return _traced(converted.function, rules, static, arrays)[1]


def _stream_key(function: Callable[..., Any], kwargs: dict[str, Any]) -> Key:
    """The key that a call's `rngs` hold, which stay an argument if the function has one."""
    rngs = kwargs.get("rngs")
    if "rngs" not in _parameters(function):
        kwargs.pop("rngs", None)
        if rngs is not None and not (isinstance(rngs, Mapping) and set(rngs) == {RNG_STREAM}):
            raise TypeError(
                "convert.function: the function has no argument rngs, so only the stream "
                f"{RNG_STREAM!r} is used, got rngs={rngs!r}; pass rngs={{{RNG_STREAM!r}: key}}"
            )
    return rngs.get(RNG_STREAM) if isinstance(rngs, Mapping) else None


# Calls -------------------------------------------------------------------------------------------


def traced_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rules: tuple[Rule, ...],
    modules: Mapping[str, jaxpr.Module],
    within: str = "",
) -> tuple[tuple[Decision, ...], Callable[..., Any]]:
    """A pure call of a model: the decisions about its products, and about layers that no rule could
    reach; and its result by a key, with the products made anew."""
    # Its first argument is the state that holds the weights, there all of it or what is below a
    # path.
    static, arrays = _split(function, (0,), args, kwargs, within)
    with jaxpr.tracing_for(rules):
        plan, decisions, by_plan = _traced(function, rules, static, arrays, modules)

    def run(key: Key, remedy: str = f"call apply(..., rngs={_KEY})") -> Any:
        _check_key(key, plan, remedy)
        return by_plan(arrays, key)

    # Those of a module that is called again are the same.
    layers = {(decision.layer.path, decision.layer.kernel): decision for decision in decisions}
    paths = {path for path, _ in layers}
    kept = (
        decide((), Layer(path=path, type=module.type, obstacle=module.obstacle))
        for path, module in modules.items()
        if module.obstacle and path not in paths and not issubclass(module.type, OPERATIONS)
    )
    return (*layers.values(), *kept), run


def _traced(
    function: Callable[..., Any],
    rules: tuple[Rule, ...],
    static: "_Static",
    arrays: Sequence[Any],
    modules: Mapping[str, jaxpr.Module] | None = None,
) -> tuple[Plan, tuple[Decision, ...], Callable[..., Any]]:
    """The plan for a call's products, the decision about each, and the call by that plan: a
    function of other arrays and a key.
    """
    program, result = read.traced(function, static.call, arrays)
    weights = list[jaxpr.Weight]()
    if modules is None and not all(static.data):
        args, kwargs = static.call.arguments(arrays)
        # As JAX orders them.
        arguments = (*args, *(kwargs[name] for name in sorted(kwargs)))
        weights = [weight for tree in arguments for weight in jaxpr.weights_of(tree)]
    plan, decisions = jaxpr.planned(program, static.data, rules, modules, weights)

    def by_plan(arrays: Sequence[Any], key: Key) -> Any:
        return result(Rewritten(program, plan, jaxpr.ByRecipe())(arrays, key))

    return plan, decisions, by_plan


def _check_key(key: Key, plan: Plan, remedy: str) -> None:
    for recipe in jaxpr.recipes_of(plan):
        # Gradients raise an error of their own.
        if key is None and recipe.output.is_stochastic:
            raise ValueError(
                f"convert.function: recipe {recipe.name!r} draws random bits and needs the "
                f"{RNG_STREAM!r} stream; {remedy}"
            )


@dataclasses.dataclass(frozen=True)
class _Static:
    call: read.Static
    # For each array, whether it is data, or in an argument that holds weights.
    data: tuple[bool, ...]


def _split(
    function: Callable[..., Any],
    weights: Arguments,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    within: str = "",
) -> tuple[_Static, list[Any]]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, entry in _parameters(function).items() if entry.kind in by_position]
    # Position and name of each argument, by what it was called with.
    called: dict[int | str, set[int | str]] = {
        i: {i, *names[i : i + 1]} for i in range(len(args))
    } | {name: {name, *([names.index(name)] if name in names else [])} for name in kwargs}
    unknown = set(weights) - set[int | str]().union(*called.values())
    if unknown:
        raise ValueError(
            f"convert.function: weights={weights!r} names arguments that {_name_of(function)} was "
            f"not called with: {', '.join(map(repr, unknown))}; it was called with {len(args)} "
            f"positional arguments and {sorted(kwargs)}"
        )
    data = []
    for (_, argument, *path), leaf in jax.tree.leaves_with_path((tuple(args), kwargs)):
        if read.is_array(leaf):
            position = argument.key if isinstance(argument, jax.tree_util.DictKey) else argument.idx
            is_named = not called[position].isdisjoint(weights)
            data.append(not is_named or not jax.tree_util.keystr(tuple(path)).startswith(within))
    call, arrays = read.split(args, kwargs)
    return _Static(call, tuple(data)), arrays


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some functions written in C have none.
        return {}


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
