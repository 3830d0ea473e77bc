"""A function as one whose products follow rules: rewritten, and then differentiated."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from mx_jax.convert import jaxpr
from mx_jax.convert.rules import Decision, Report, Rule, as_rules
from mx_jax.nn.layers import RNG_STREAM
from mx_jax.ops.arguments import Key
from mx_jax.recipes import Recipe

P = ParamSpec("P")
R = TypeVar("R")
# Positions and names of arguments.
Arguments = tuple[int | str, ...]
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


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
            f"convert.function: needs a function, got {type(fn).__name__}; use convert.tree for a "
            "pytree of layers"
        )
    own = as_rules(rules, "convert.function")
    return ConvertedFunction(original(fn), own, _as_arguments(weights), strict)


@dataclasses.dataclass(frozen=True)
class ConvertedFunction(Generic[P, R]):
    """What `convert.function` gives, with its arguments; equal ones are equal to jit."""

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
        vars(self).update(
            {name: getattr(self.function, name) for name in _NAMES if hasattr(self.function, name)},
            __wrapped__=self.function,
        )

    @functools.cached_property
    def _compiled(self) -> Any:
        # Of this object alone, so that what the function closes over goes when it goes.
        def run(static: "_Static", arrays: list[Any], key: Key) -> R:
            traced = _traced(self.function, self.rules, static, arrays)
            result = Report(rules=self.rules, decisions=traced.decisions)
            result.check("convert.function", self.strict, self._used)
            self._used.update(result.used)
            _check_key(key, jaxpr.recipes_of(traced.plan), _name_of(self.function))
            return traced.run(arrays, key)

        run.__name__ = run.__qualname__ = _name_of(self.function)
        return jax.jit(run, static_argnums=0)

    def __reduce__(self):
        return type(self), (self.function, self.rules, self.weights, self.strict)

    def __call__(self, *args: object, **kwargs: object) -> R:
        rngs = kwargs.get("rngs")
        key = rngs.get(RNG_STREAM) if isinstance(rngs, Mapping) else None
        if not _takes_rngs(self.function):
            _check_streams(kwargs.pop("rngs", None))
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
    fn = original(fn)
    if not _takes_rngs(fn):
        _check_streams(kwargs.pop("rngs", None))
    static, arrays = _split(fn, _as_arguments(weights), args, kwargs)
    return _traced(fn, rules, static, arrays).decisions


def original(fn: Callable[P, R]) -> Callable[P, R]:
    """The function that was converted; one that was not, as it is."""
    return fn.function if isinstance(fn, ConvertedFunction) else fn


def _as_arguments(weights: int | str | Sequence[int | str]) -> Arguments:
    return (weights,) if isinstance(weights, int | str) else tuple(weights)


def call_by_recipe(
    function: Callable[..., R],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    recipe: Recipe,
    name: str,
    key: Key,
    dot_general: jaxpr.DotGeneral,
) -> R:
    """The result of a call whose products are all made by one recipe; errors call it by name."""
    # The kernel is the operand that no argument goes into.
    static, arrays = _split(function, (), args, kwargs)
    traced = _traced(function, (Rule(".*", recipe),), static, arrays)
    if not traced.plan:
        raise ValueError(
            f"convert: a rule names the type of {name}, but its call contains no dot_general "
            "or ragged_dot that can be quantized: drop the type from the rule"
        )
    # Its products go by the layer's name, without subscripts of an einsum.
    return traced.run(arrays, key, dot_general=dot_general, tagged=False)


def call_of_model(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    rules: tuple[Rule, ...],
    modules: Mapping[str, jaxpr.Module],
    record: Callable[[tuple[Decision, ...]], None],
    key: Key = None,
    runs: bool = True,
    within: str = "",
) -> Any:
    """The result of a pure call of a model, with those products made anew that no layer has."""
    # Its first argument is the state that holds the weights, there all of it or what is below a
    # path; `record` takes what the rules say.
    static, arrays = _split(function, (0,), args, kwargs, within)
    with jaxpr.tracing(rules):
        traced = _traced(function, rules, static, arrays, modules)
    record(traced.decisions)
    if not runs:
        return None
    _check_key(key, jaxpr.recipes_of(traced.plan), "apply")
    return traced.run(arrays, key)


@dataclasses.dataclass(frozen=True)
class _Traced(Generic[R]):
    """A call as a jaxpr, the decision about each of its products, and what becomes of it."""

    program: Any
    plan: jaxpr.Plan
    decisions: tuple[Decision, ...]
    # From the arrays of the result to what the function gives back.
    result: Callable[[Sequence[Any]], R]

    def run(self, arrays: Sequence[Any], key: Key, **options: Any) -> R:
        """The result of a call with other arrays; options are those of `PlannedBody`."""
        return self.result(jaxpr.PlannedBody(self.program, self.plan, **options)(arrays, key))


def _traced(
    function: Callable[..., R],
    rules: tuple[Rule, ...],
    static: "_Static",
    arrays: Sequence[Any],
    modules: Mapping[str, jaxpr.Module] | None = None,
) -> _Traced[R]:
    """A call as a jaxpr, and what the rules say of it. What it gives back may be no array too."""
    found: list[tuple[Any, list[Any]]] = []

    def call(arrays: Sequence[Any]) -> list[Any]:
        leaves, structure = jax.tree.flatten(static.call(function, arrays))
        found[:] = [(structure, [None if _is_array(leaf) else leaf for leaf in leaves])]
        return [leaf for leaf in leaves if _is_array(leaf)]

    def result(values: Sequence[Any]) -> R:
        given, ((structure, leaves),) = iter(values), found
        return jax.tree.unflatten(structure, [next(given) if x is None else x for x in leaves])

    program = jax.make_jaxpr(call)(arrays)
    return _Traced(program, *jaxpr.planned(program, static.data, rules, modules), result)


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _check_key(key: Key, recipes: Sequence[Recipe], name: str) -> None:
    for recipe in recipes:
        # Gradients raise an error of their own.
        if key is None and recipe.fwd.is_stochastic:
            raise ValueError(
                f"convert.function: recipe {recipe.name!r} draws random bits and needs the "
                f"{RNG_STREAM!r} stream; call {name}(..., rngs={{{RNG_STREAM!r}: key}})"
            )


def _check_streams(rngs: object) -> None:
    if rngs is None or (isinstance(rngs, Mapping) and set(rngs) == {RNG_STREAM}):
        return
    raise TypeError(
        f"convert.function: the function has no argument rngs, so only the stream {RNG_STREAM!r} "
        f"is used, got rngs={rngs!r}; pass rngs={{{RNG_STREAM!r}: key}}"
    )


@dataclasses.dataclass(frozen=True)
class _Static:
    # Of `(args, kwargs)`, and each leaf that is no array, None for one. With its type, and a float
    # with its text, it is equal to what nothing can tell from it: True is not 1, 0.0 not -0.0.
    structure: Any
    constants: tuple[tuple[Any, type, str] | None, ...]
    # For each array, whether it is data, or in an argument that holds weights.
    data: tuple[bool, ...]

    def call(self, function: Callable[..., R], arrays: Sequence[Any]) -> R:
        given = iter(arrays)
        leaves = [next(given) if own is None else own[0] for own in self.constants]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return function(*args, **kwargs)


def _split(
    function: Callable[..., Any],
    weights: Arguments,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    within: str = "",
) -> tuple[_Static, list[Any]]:
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [own.name for own in _parameters(function).values() if own.kind in by_position]
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
    leaves, structure = jax.tree.flatten_with_path((tuple(args), kwargs))
    constants, data, arrays = [], [], []
    for (_, argument, *path), leaf in leaves:
        if _is_array(leaf):
            constants.append(None)
            arrays.append(leaf)
            given = argument.key if isinstance(argument, jax.tree_util.DictKey) else argument.idx
            is_named = not called[given].isdisjoint(weights)
            data.append(not is_named or not jax.tree_util.keystr(tuple(path)).startswith(within))
        else:
            text = repr(leaf) if isinstance(leaf, float | complex) else ""
            constants.append((leaf, type(leaf), text))
    return _Static(structure, tuple(constants), tuple(data)), arrays


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some functions written in C have none.
        return {}


def _takes_rngs(function: Callable[..., Any]) -> bool:
    return "rngs" in _parameters(function)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
