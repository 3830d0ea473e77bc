"""Pytrees of layers, Equinox's among them: layers replaced in the tree, one for one."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from mx_jax.convert.foreign import with_products
from mx_jax.convert.kind import Kind
from mx_jax.convert.kinds import FOREIGN, foreign_facts, kind_of
from mx_jax.convert.report import Report
from mx_jax.convert.rules import Decision, Layer, Rule, as_rules, decide
from mx_jax.convert.waiting import waiting
from mx_jax.nn.layers import named_in_errors
from mx_jax.recipes import Recipe

T = TypeVar("T")


def tree(model: T, rules: Rule | Sequence[Rule], *, strict: bool = False) -> T:
    """A pytree whose layers follow rules: the same leaves at the same paths, the same methods.

    Nodes of known types are replaced, where a rule matches: Equinox's `Linear`, `LSTMCell` and
    `GRUCell`, those that are told by `convert.register`, and any callable node whose type a rule
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
    rules, decisions = as_rules(rules, "convert.tree"), list[Decision]()
    converted = _converted(_of_nodes(model, "convert.tree"), rules, (), decisions)
    Report(rules=rules, decisions=tuple(decisions)).check("convert.tree", strict)
    return converted


def report(model: Any, rules: Rule | Sequence[Rule], *, strict: bool = False) -> Report:
    """What rules do to a pytree.

    Args:
      model: as `tree` takes it.
      rules: as `tree` takes them.
      strict: whether a rule that matched nothing is an error instead of a warning.
    """
    rules, decisions = as_rules(rules, "convert.report"), list[Decision]()
    _converted(_of_nodes(model, "convert.report"), rules, (), decisions)
    result = Report(rules=rules, decisions=tuple(decisions))
    result.check("convert.report", strict)
    return result


def original(model: T) -> T:
    """A pytree with the layers that it had before conversion."""

    def is_ours(node: Any) -> bool:
        return type(node) is ConvertedLayer

    def layer_of(node: Any) -> Any:
        return node.mx_layer if is_ours(node) else node

    if not any(map(is_ours, jax.tree.leaves(model, is_leaf=is_ours))):
        return model
    return jax.tree.map(layer_of, model, is_leaf=is_ours)


def has_nodes(model: Any) -> bool:
    """Whether a value is a pytree with a node, and no leaf."""
    return not jax.tree_util.all_leaves([model])


class ConvertedLayer:
    """A layer of a tree whose products follow a recipe; otherwise the layer itself.

    A node with the layer's own children and keys, so that paths of leaves stay. What it multiplies
    with is static, and compares by value.
    """

    def __init__(self, layer: Any, recipe: Recipe, operation: Callable[..., Any]):
        """Make it.

        Args:
          layer: the layer.
          recipe: its recipe.
          operation: what its products are made by.
        """
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

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The layer's call, with its products made anew."""
        # Not by its path, by which equal layers would differ.
        name, (recipe, operation) = type(self.mx_layer).__name__, self.mx_static
        key = options.get("key")
        call = type(self.mx_layer).__call__
        if "key" in options and not _takes_key(call):
            options = {name: value for name, value in options.items() if name != "key"}
        if key is None and recipe.fwd.is_stochastic:
            raise ValueError(
                f"convert.tree: {name} gets recipe {recipe.name!r}, which draws random bits; pass "
                "key= in the layer's call, or convert the function that calls it: convert.function"
            )
        product, drawn = waiting(operation), iter(range(1 << 30))

        def multiply(*operands: Any, **params: Any) -> Any:
            own = None if key is None else jax.random.fold_in(key, next(drawn))
            return product(*operands, **params, key=own if recipe.is_stochastic else None)

        with named_in_errors(f"{name}, converted by convert.tree"):
            run = with_products(functools.partial(call, self.mx_layer), multiply, name)
            return run(*args, **options)


def _flatten(node: ConvertedLayer) -> Any:
    children, structure = _children(node.mx_layer)
    return children, (structure, node.mx_static)


def _unflatten(static: Any, children: Iterable[Any]) -> ConvertedLayer:
    structure, own = static
    return ConvertedLayer(jax.tree.unflatten(structure, list(children)), *own)


jax.tree_util.register_pytree_with_keys(ConvertedLayer, _flatten, _unflatten)


def _takes_key(call: Callable[..., Any]) -> bool:
    parameters = inspect.signature(call).parameters.values()
    return any(own.name == "key" or own.kind is own.VAR_KEYWORD for own in parameters)


def _children(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """A node's children with their keys, and its structure; for a leaf, itself under no key."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda inner: inner is not node
    )
    return [(path[0] if path else None, child) for path, child in found], structure


def _of_nodes(model: T, operation: str) -> T:
    if not has_nodes(model):
        raise TypeError(
            f"{operation}: needs a pytree of layers, got {type(model).__name__}; use "
            "convert.function for a function"
        )
    return original(model)


def _converted(
    node: Any, rules: tuple[Rule, ...], path: tuple[Any, ...], decisions: list[Decision]
) -> Any:
    """A node with its layers replaced; what was decided goes to the list, in the tree's order."""
    found = _judged(node)
    if found is not None:
        kind, facts = found
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        decision = decide(rules, Layer(path=name, type=type(node), **facts))
        decisions.append(decision)
        if decision.recipe is not None:
            return ConvertedLayer(node, decision.recipe, kind.operation(decision.recipe))
        if kind is not FOREIGN:
            return node
    children, structure = _children(node)
    if not has_nodes(node):
        return node
    after = [_converted(child, rules, (*path, key), decisions) for key, child in children]
    if all(new is old for new, (_, old) in zip(after, children, strict=True)):
        return node
    return jax.tree.unflatten(structure, after)


def _judged(node: Any) -> tuple[Kind, dict[str, Any]] | None:
    """The kind of a node, and the fields of `Layer` that rules judge it by; None: no product."""
    kind = kind_of(node)
    if kind is not None and kind.tree:
        stored = getattr(kind.kernel(node), "shape", None)
        if stored is None:
            # Equinox leaves None in the place of what it has taken out of a tree.
            return None
        facts = kind.facts(node, tuple(stored[len(stored) - kind.kernel_ndim(node) :]))
        # With the axes of a stack.
        return kind, facts | {"kernel": tuple(stored)}
    if not callable(node) or not has_nodes(node):
        return None
    children, _ = _children(node)
    kernels = [tuple(child.shape) for _, child in children if len(getattr(child, "shape", ())) >= 2]
    inner = [str(key) for key, child in children if any(_layers(child))]
    facts = foreign_facts(node, kernels, inner)
    return None if facts is None else (FOREIGN, facts)


def _layers(node: Any) -> Iterator[Any]:
    """Nodes at and below a node that have a product."""
    if has_nodes(node):
        if _judged(node) is not None:
            yield node
        for _, child in _children(node)[0]:
            yield from _layers(child)
