"""Pytrees of layers, Equinox's among them: layers replaced in the tree, one for one."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mx_jax.convert.functions import call_by_recipe
from mx_jax.convert.kinds import Kind, facts_held, kind_of
from mx_jax.convert.rules import Decision, Layer, Report, Rule, as_rules, decide
from mx_jax.nn.layers import named_in_errors
from mx_jax.ops.arguments import Key
from mx_jax.recipes import Recipe
from mx_jax.reference.random_bits import DerivedKey

T = TypeVar("T")


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
    rules = as_rules(rules, "convert.tree")
    converted, found = _tree(model, rules, "convert.tree")
    Report(rules=rules, decisions=found).check("convert.tree", strict)
    return converted


def decisions(model: object, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    """What rules say of the layers of a pytree."""
    return _tree(model, rules, "convert.report")[1]


def _tree(model: T, rules: tuple[Rule, ...], operation: str) -> tuple[T, tuple[Decision, ...]]:
    if not has_nodes(model):
        raise TypeError(
            f"{operation}: needs a pytree of layers, got {type(model).__name__}; use "
            "convert.function for a function"
        )
    found: list[Decision] = []
    return _converted(original(model), rules, (), found), tuple(found)


def original(model: T) -> T:
    """A pytree with the layers that it had before conversion."""

    def is_ours(node: object) -> bool:
        return type(node) is ConvertedLayer

    if not any(map(is_ours, jax.tree.leaves(model, is_leaf=is_ours))):
        return model
    return jax.tree.map(
        lambda node: node.mx_layer if is_ours(node) else node, model, is_leaf=is_ours
    )


def has_nodes(model: object) -> bool:
    """Whether a value is a pytree with a node, and no leaf."""
    return not jax.tree_util.all_leaves([model])


class ConvertedLayer:
    """A layer of a tree whose products follow a recipe; otherwise the layer itself."""

    # A node with the layer's own children and keys, so that paths of leaves stay. What it
    # multiplies with is static, and compares by value.

    def __init__(self, layer: object, recipe: Recipe, operation: Callable[..., Any]):
        # Not by setattr: attributes are the layer's.
        vars(self).update(mx_layer=layer, mx_static=(recipe, operation))

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.mx_layer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("mx_"):
            # A copy that is being made has none yet.
            raise AttributeError(name)
        return getattr(self.mx_layer, name)

    def __repr__(self) -> str:
        return f"{self.mx_layer!r} by {self.mx_static[0].name}"

    def __reduce__(self):
        return ConvertedLayer, (self.mx_layer, *self.mx_static)

    def __call__(self, *args: object, **options: Any) -> Any:
        # Not by its path, by which equal layers would differ.
        name, (recipe, operation) = type(self.mx_layer).__name__, self.mx_static
        key, call = options.get("key"), type(self.mx_layer).__call__
        parameters = inspect.signature(call).parameters.values()
        if not any(own.name == "key" or own.kind is own.VAR_KEYWORD for own in parameters):
            options.pop("key", None)
        if key is None and recipe.fwd.is_stochastic:
            raise ValueError(
                f"convert.tree: {name} gets recipe {recipe.name!r}, which draws random bits; pass "
                "key= in the layer's call, or convert the function that calls it: convert.function"
            )
        with named_in_errors(f"{name}, converted by convert.tree"):
            return call_by_recipe(
                functools.partial(call, self.mx_layer),
                args,
                options,
                recipe=recipe,
                name=name,
                key=key if recipe.is_stochastic else None,
                dot_general=lambda _: deferred(operation),
            )


def _flatten(node: ConvertedLayer) -> Any:
    children, structure = _children(node.mx_layer)
    return children, (structure, node.mx_static)


def _unflatten(static: tuple[Any, tuple[Any, ...]], children: Iterable[Any]) -> ConvertedLayer:
    structure, own = static
    return ConvertedLayer(jax.tree.unflatten(structure, list(children)), *own)


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
    judged = _judged(node, [key for key, own in below.items() if own])
    if judged is not None:
        kind, facts = judged
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        decision = decide(rules, Layer(path=name, type=type(node), **facts))
        found.append(decision)
        if (recipe := decision.recipe) is not None:
            made = recipe.dot_general if kind is None else kind.operation(recipe)
            return ConvertedLayer(node, recipe, made)
        if kind is not None:
            return node
    found += (decision for own in below.values() for decision in own)
    if all(new is old for new, (_, old) in zip(after, children, strict=True)):
        return node
    return jax.tree.unflatten(structure, after)


def _judged(node: object, inner: Sequence[object]) -> tuple[Kind | None, dict[str, Any]] | None:
    """A node's kind if it is known, and the fields of `Layer` for rules; None: no product."""
    kind = kind_of(node)
    if kind is not None and kind.tree:
        # Equinox leaves None in the place of what it has taken out of a tree.
        has_kernel = getattr(kind.kernel(node), "shape", None) is not None
        return (kind, facts_held(node, kind)) if has_kernel else None
    if not callable(node):
        return None
    shapes = (getattr(child, "shape", ()) for _, child in _children(node)[0])
    kernel = next((tuple(shape) for shape in shapes if len(shape) >= 2), None)
    if kernel is None:
        return None
    obstacle = f"has layers of its own: {', '.join(map(str, inner))}" if inner else None
    # Which axes it contracts is not known.
    return None, {"kernel": kernel, "named_only": True, "obstacle": obstacle}


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
        if out_sharding is not None:
            # On axes of an explicit mesh JAX asks for the product's sharding at once.
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
