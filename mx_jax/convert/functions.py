"""Functions, and pytrees of layers, Equinox's among them, whose products follow rules.

A function is rewritten, and then differentiated. In a tree layers are replaced, one for one.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mx_jax.codecs.rounding import DerivedKey
from mx_jax.convert import jaxpr
from mx_jax.convert.kinds import facts_held, kind_of
from mx_jax.convert.rules import Decision, Layer, Report, Rule, as_rules, decide
from mx_jax.jaxpr import read
from mx_jax.jaxpr.rewrite import Plan, Rewritten
from mx_jax.nn.layers import RNG_STREAM, named_in_errors
from mx_jax.ops.arguments import Key
from mx_jax.recipes import Recipe

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Positions and names of arguments.
Arguments = tuple[int | str, ...]


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
    fn = fn.function if isinstance(fn, ConvertedFunction) else fn
    named = (weights,) if isinstance(weights, int | str) else tuple(weights)
    return ConvertedFunction(fn, as_rules(rules, "convert.function"), named, strict)


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
        names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(self.function, name)]
        vars(self).update({name: getattr(self.function, name) for name in names})
        vars(self).update(__wrapped__=self.function)

    @functools.cached_property
    def _compiled(self) -> Any:
        # Of this object alone, so that what the function closes over goes when it goes.
        def run(static: "_Static", arrays: list[Any], key: Key) -> R:
            plan, decisions, by_plan = _traced(self.function, self.rules, static, arrays)
            result = Report(rules=self.rules, decisions=decisions)
            result.check("convert.function", self.strict, self._used)
            self._used.update(result.used)
            _check_key(key, plan, _name_of(self.function))
            return by_plan(arrays, key)

        run.__name__ = run.__qualname__ = _name_of(self.function)
        return jax.jit(run, static_argnums=0)

    def __reduce__(self):
        return type(self), (self.function, self.rules, self.weights, self.strict)

    def __call__(self, *args: object, **kwargs: object) -> R:
        key = _own_key(self.function, kwargs)
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
    _own_key(converted.function, kwargs)
    static, arrays = _split(converted.function, converted.weights, args, kwargs)
    return _traced(converted.function, rules, static, arrays)[1]


def _own_key(function: Callable[..., Any], kwargs: dict[str, Any]) -> Key:
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


def original(model: Any) -> Any:
    """The function that was converted, or a tree with the layers that it had before."""
    if isinstance(model, ConvertedFunction):
        return model.function

    def is_ours(node: object) -> bool:
        return type(node) is ConvertedLayer

    if not any(map(is_ours, jax.tree.leaves(model, is_leaf=is_ours))):
        return model
    return jax.tree.map(
        lambda node: node.mx_layer if is_ours(node) else node, model, is_leaf=is_ours
    )


# Calls -------------------------------------------------------------------------------------------


def call_of_model(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    rules: tuple[Rule, ...],
    modules: Mapping[str, jaxpr.Module],
    key: Key = None,
    runs: bool = True,
    within: str = "",
    callback: Callable[[tuple[Decision, ...]], None],
) -> Any:
    """The result of a pure call of a model, with its products made anew."""
    # Its first argument is the state that holds the weights, there all of it or what is below a
    # path.
    static, arrays = _split(function, (0,), args, kwargs, within)
    with jaxpr.tracing_for(rules):
        plan, decisions, by_plan = _traced(function, rules, static, arrays, modules)
    # Those of a module that is called again are the same.
    callback(tuple({(own.layer.path, own.layer.kernel): own for own in decisions}.values()))
    if not runs:
        return None
    _check_key(key, plan, "apply")
    return by_plan(arrays, key)


def _traced(
    function: Callable[..., Any],
    rules: tuple[Rule, ...],
    static: "_Static",
    arrays: Sequence[Any],
    modules: Mapping[str, jaxpr.Module] | None = None,
) -> tuple[Plan, tuple[Decision, ...], Callable[..., Any]]:
    """What becomes of a call's products, what the rules say of each, and the call by that plan.

    The last takes other arrays, a key, and the options of `ByRecipe`. What it gives back may be no
    array too.
    """
    program, result = read.traced(function, static.call, arrays)
    plan, decisions = jaxpr.planned(program, static.data, rules, modules)

    def by_plan(arrays: Sequence[Any], key: Key, **options: Any) -> Any:
        return result(Rewritten(program, plan, jaxpr.ByRecipe(**options))(arrays, key))

    return plan, decisions, by_plan


def _check_key(key: Key, plan: Plan, name: str) -> None:
    for recipe in jaxpr.recipes_of(plan):
        # Gradients raise an error of their own.
        if key is None and recipe.output.is_stochastic:
            raise ValueError(
                f"convert.function: recipe {recipe.name!r} draws random bits and needs the "
                f"{RNG_STREAM!r} stream; call {name}(..., rngs={{{RNG_STREAM!r}: key}})"
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
    data = []
    for (_, argument, *path), leaf in jax.tree.leaves_with_path((tuple(args), kwargs)):
        if read.is_array(leaf):
            given = argument.key if isinstance(argument, jax.tree_util.DictKey) else argument.idx
            is_named = not called[given].isdisjoint(weights)
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


# Trees -------------------------------------------------------------------------------------------


def tree(model: T, rules: Rule | Sequence[Rule], *, strict: bool = False) -> T:
    """A pytree whose layers follow rules: the same leaves at the same paths, the same methods.

    Nodes of known types are replaced, where a rule matches: Equinox's `Linear`, `LSTMCell` and
    `GRUCell`, those of `convert.register`, and any callable node whose type a rule
    names. A replaced layer is called as it was, has its attributes and its type for `isinstance`;
    its products follow the recipe. `jax.vmap` of it is the product of the batch. Nothing else of
    the tree changes, and nothing of the model that is given.

    Args:
      model: a pytree; a converted one gets the new rules instead of its old.
      rules: the first that matches a layer decides; see `Rule`. A path is that of the node,
        `"layers/0"`.
      strict: whether a rule that matched nothing is an error instead of an `UnusedRuleWarning`.

    Returns:
      A pytree of the same type. Recipes that draw random bits draw from the argument `key` of the
      layer's call, as Equinox's layers take it.

    Raises:
      TypeError: not a pytree with nodes, or not rules.
      ValueError: with strict, a rule that matched nothing; in the call, a key missing.

    Examples:
      >>> import dataclasses, jax, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> @jax.tree_util.register_dataclass
      ... @dataclasses.dataclass
      ... class Affine:
      ...     weight: jax.Array
      ...     def __call__(self, x):
      ...         return x @ self.weight
      >>> model = {"up": Affine(jnp.ones((64, 32))), "down": Affine(jnp.ones((32, 8)))}
      >>> rules = convert.Rule("up", "mxfp8", types=Affine)
      >>> print(convert.report(model, rules))
      layer  type    kernel  rule  recipe
      down   Affine  32x8    -     (no rule matches)
      up     Affine  64x32   0     mxfp8
      1 of 2 layers converted
      >>> quantized = convert.tree(model, rules)
      >>> up = quantized["up"]
      >>> up(jnp.ones(64)).shape, up.weight is model["up"].weight
      ((32,), True)
    """
    rules, found = as_rules(rules, "convert.tree"), list[Decision]()
    if not has_nodes(model):
        raise TypeError(
            f"convert.tree: needs a pytree of layers, got {type(model).__name__}; use "
            "convert.function for a function"
        )
    converted = _converted(original(model), rules, (), found)
    Report(rules=rules, decisions=tuple(found)).check("convert.tree", strict)
    return converted


def decisions_of_tree(model: object, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    """What rules say of the layers of a pytree."""
    found: list[Decision] = []
    _converted(original(model), rules, (), found)
    return tuple(found)


def has_nodes(model: object) -> bool:
    """Whether a value is a pytree with a node, and no leaf."""
    return not jax.tree_util.all_leaves([model])


class ConvertedLayer:
    """A layer of a tree whose products follow a recipe; otherwise the layer itself."""

    # A node with the layer's own children and keys, so that paths of leaves stay. What it
    # multiplies with is static, and compares by value.

    def __init__(self, layer: object, recipe: Recipe):
        # Not by setattr: attributes are the layer's.
        vars(self).update(mx_layer=layer, mx_recipe=recipe)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.mx_layer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("mx_"):
            # A copy that is being made has none yet.
            raise AttributeError(name)
        return getattr(self.mx_layer, name)

    def __repr__(self) -> str:
        return f"{self.mx_layer!r} by {self.mx_recipe.name}"

    def __reduce__(self):
        return ConvertedLayer, (self.mx_layer, self.mx_recipe)

    def __call__(self, *args: object, **options: Any) -> Any:
        # Not by its path, by which equal layers would differ.
        name, recipe = type(self.mx_layer).__name__, self.mx_recipe
        key, call = options.get("key"), type(self.mx_layer).__call__
        parameters = inspect.signature(call).parameters.values()
        if not any(own.name == "key" or own.kind is own.VAR_KEYWORD for own in parameters):
            options.pop("key", None)
        if key is None and recipe.output.is_stochastic:
            raise ValueError(
                f"convert.tree: {name} gets recipe {recipe.name!r}, which draws random bits; pass "
                "key= in the layer's call, or convert the function that calls it: convert.function"
            )
        with named_in_errors(f"{name}, converted by convert.tree"):
            # The kernel is the operand that no argument goes into.
            run = functools.partial(call, self.mx_layer)
            static, arrays = _split(run, (), args, options)
            plan, _, by_plan = _traced(run, (Rule(".*", recipe),), static, arrays)
            if not plan:
                raise ValueError(
                    f"convert: a rule names the type of {name}, but its call contains no "
                    "dot_general or ragged_dot that can be quantized: drop the type from the rule"
                )
            # Its products go by the layer's name, without subscripts of an einsum.
            return by_plan(
                arrays,
                key if recipe.is_stochastic else None,
                dot_general=lambda recipe: deferred(recipe.dot_general),
                named=False,
            )


def _flatten(node: ConvertedLayer) -> Any:
    children, structure = _children(node.mx_layer)
    return children, (structure, node.mx_recipe)


def _unflatten(static: tuple[Any, Recipe], children: Iterable[Any]) -> ConvertedLayer:
    structure, recipe = static
    return ConvertedLayer(jax.tree.unflatten(structure, list(children)), recipe)


jax.tree_util.register_pytree_with_keys(ConvertedLayer, _flatten, _unflatten)


def _children(node: object) -> tuple[list[tuple[Any, Any]], Any]:
    """A node's children with their keys, and its structure; for a leaf, itself under no key."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda inner: inner is not node
    )
    return [(path[0] if path else None, child) for path, child in found], structure


def _converted(
    node: object, rules: tuple[Rule, ...], path: tuple[Any, ...], found: list[Decision]
) -> Any:
    """A node with its layers replaced; what was decided goes to the list, in the tree's order."""
    if not has_nodes(node):
        return node
    children, structure = _children(node)
    after: list[Any] = []
    below: dict[Any, list[Decision]] = {}
    for key, child in children:
        own = below.setdefault(key, [])
        after.append(_converted(child, rules, (*path, key), own))
    kind, facts = kind_of(node), None
    if kind is not None and kind.tree:
        # Equinox leaves None in the place of what it has taken out of a tree.
        if getattr(kind.kernel(node), "shape", None) is not None:
            facts = facts_held(node, kind)
    elif callable(node):
        # Which axes it contracts is not known: it is traced, if a rule names its type.
        kind = None
        shapes = (tuple(getattr(child, "shape", ())) for _, child in children)
        if kernel := next((shape for shape in shapes if len(shape) >= 2), None):
            inner = ", ".join(str(key) for key, own in below.items() if own)
            obstacle = f"has layers of its own: {inner}" if inner else None
            facts = {"kernel": kernel, "named_only": True, "obstacle": obstacle}
    if facts is not None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        decision = decide(rules, Layer(path=name, type=type(node), **facts))
        found.append(decision)
        if (recipe := decision.recipe) is not None:
            return ConvertedLayer(node, recipe)
        if kind is not None:
            return node
    found += (decision for own in below.values() for decision in own)
    if all(new is old for new, (_, old) in zip(after, children, strict=True)):
        return node
    return jax.tree.unflatten(structure, after)


# Products that wait for vmap ---------------------------------------------------------------------

_product_p = Primitive("mx_jax_product")


def deferred(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A product, called as `jax.lax.dot_general` with `key`, that vmap makes that of the batch."""
    # As a primitive it is differentiated after vmap. Otherwise the gradient of a kernel `[k, n]`
    # would be one for each example, `[batch, k, n]`, in blocks of one row.

    def multiply(
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: lax.DotDimensionNumbers,
        precision: object = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        *,
        out_sharding: object = None,
        key: Key = None,
    ) -> jax.Array:
        dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs.dtype, rhs.dtype))
        options = {"precision": precision, "preferred_element_type": dtype}
        if out_sharding is not None or not all(isinstance(x, jax.Array) for x in (lhs, rhs)):
            # On axes of an explicit mesh JAX asks for the product's sharding at once. Stored codes
            # have no gradient.
            options |= {"out_sharding": out_sharding, "key": key}
            return product(lhs, rhs, dimension_numbers, **options)
        operands = (lhs, rhs) if key is None else (lhs, rhs, DerivedKey.of(key).get())
        return _product_p.bind(
            *operands, dimension_numbers=dimension_numbers, product=product, **options
        )

    return multiply


def _make(
    lhs: jax.Array,
    rhs: jax.Array,
    *key: jax.Array,
    dimension_numbers: object,
    product: Callable[..., jax.Array],
    **options: object,
) -> jax.Array:
    return product(lhs, rhs, dimension_numbers, **options, key=key[0] if key else None)


def _shaped(
    lhs: object, rhs: object, *key: object, product: Callable[..., jax.Array], **params: object
) -> Any:
    shaped, _ = dot_general_p.abstract_eval(lhs, rhs, out_sharding=None, **params)
    return shaped


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    lhs, rhs, *key = primals
    own = tuple(ad.instantiate_zeros(tangent) for tangent in tangents[:2])
    return jax.jvp(lambda lhs, rhs: _make(lhs, rhs, *key, **params), (lhs, rhs), own)


def _mapped(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    lhs, rhs, *key = operands
    left, right, *others = axes
    if any(axis is not None for axis in others):
        # A key for each: then they are as many products.
        out = jax.vmap(functools.partial(_make, **params), tuple(axes))(*operands)
        return out, 0
    # The mapped axis goes first, so that others count one more: of both operands it is a batch axis
    # of the product, of one it is kept.
    (lhs_k, rhs_k), (lhs_batch, rhs_batch) = params.pop("dimension_numbers")
    lhs, lhs_k, lhs_batch = _first(left, lhs, lhs_k, lhs_batch)
    rhs, rhs_k, rhs_batch = _first(right, rhs, rhs_k, rhs_batch)
    place = len(lhs_batch)
    if left is not None and right is not None:
        lhs_batch, rhs_batch, place = (0, *lhs_batch), (0, *rhs_batch), 0
    elif left is None:
        place = lhs.ndim - len(lhs_k)
    numbers = (lhs_k, rhs_k), (lhs_batch, rhs_batch)
    return _product_p.bind(lhs, rhs, *key, dimension_numbers=numbers, **params), place


def _first(mapped: int | None, operand: jax.Array, *groups: Sequence[int]) -> Any:
    """An operand with its mapped axis in front, and its other axes as they are numbered then."""
    if mapped is None:
        return operand, *map(tuple, groups)
    operand = jnp.moveaxis(operand, mapped, 0)
    return operand, *(tuple(axis + 1 for axis in axes) for axes in groups)


_STATIC = ("dimension_numbers", "product", "precision", "preferred_element_type")
_product_p.def_impl(jax.jit(_make, static_argnames=_STATIC))
_product_p.def_abstract_eval(_shaped)
ad.primitive_jvps[_product_p] = _differentiated
batching.primitive_batchers[_product_p] = _mapped
mlir.register_lowering(_product_p, mlir.lower_fun(_make, multiple_results=False))
