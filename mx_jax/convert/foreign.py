"""Layers that call jax.numpy themselves: their traced call, with its products made anew.

A layer without an attribute to set (somebody's own Einsum, `x @ kernel`) is traced to a jaxpr, and
the jaxpr is run with every dot_general and ragged_dot in the hands of a recipe. Only a rule that
names the layer's type does this, and only to a layer without submodules: its products are then its
own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p, jit_p

from mx_jax.convert.traced_products import RaggedDot, traced_products
from mx_jax.inspect.abstract import of_arrays
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class ForeignProduct:
    """What a traced layer multiplies with: `jax.lax.dot_general` or `ragged_dot`, by a recipe.

    Attributes:
      recipe: what to quantize.
    """

    recipe: Recipe

    def __call__(
        self, lhs: Any, rhs: Any, dimensions: Any, *, group_sizes: Any = None, **options: Any
    ) -> jax.Array:
        """The product; with group sizes of rows in groups, which has no dimension numbers."""
        if group_sizes is None:
            return self.recipe.dot_general(lhs, rhs, dimensions, **options)
        return ragged_dot(lhs, rhs, group_sizes, recipe=self.recipe, **options)


def with_products(
    function: Callable[..., Any],
    multiply: Callable[..., jax.Array],
    name: str,
    *,
    strict: bool = True,
) -> Callable[..., Any]:
    """A function whose dot_generals and ragged_dots, those in a jit included, another makes.

    Args:
      function: of arrays and of values that stay what they are, such as subscripts.
      multiply: called like `jax.lax.dot_general`, by keyword after the dimension numbers, with the
        kernel on the right: an operand that no argument of the function goes into. Called with
        `group_sizes` and dimension numbers of None like `jax.lax.ragged_dot`.
      name: for errors.
      strict: whether a function without either is an error.

    Returns:
      A function of the same arguments.

    Raises:
      ValueError: when called, if there is neither; with strict.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        flat, arrays = of_arrays(function, *args, **kwargs)
        program, shape = jax.make_jaxpr(flat, return_shape=True)(arrays)
        if strict and not _has_product(program):
            raise ValueError(
                f"convert: a rule names the type of {name}, but its call contains no dot_general "
                "or ragged_dot; its products may be in a loop, or there are none: drop the type "
                "from the rule"
            )
        results = _evaluate(program, arrays, multiply, [True] * len(arrays))
        return jax.tree.unflatten(jax.tree.structure(shape), [value for value, _ in results])

    return run


def _has_product(program: ClosedJaxpr) -> bool:
    return any(
        eqn.primitive is dot_general_p
        or _is_ragged(eqn)
        or (eqn.primitive is jit_p and _has_product(eqn.params["jaxpr"]))
        for eqn in program.jaxpr.eqns
    )


def _is_ragged(eqn: Any) -> bool:
    """Whether an equation is a ragged_dot that a recipe can follow; others stay as they are."""
    row = traced_products().get(eqn.primitive)
    if row is None or row.type is not RaggedDot:
        return False
    return row.facts(*(atom.aval for atom in eqn.invars), eqn.params)["obstacle"] is None


def _evaluate(
    program: ClosedJaxpr,
    arguments: list[Any],
    multiply: Callable[..., jax.Array],
    from_input: list[bool],
) -> list[tuple[Any, bool]]:
    """Values of a jaxpr's results, each with whether an argument of the function goes into it."""
    jaxpr = program.jaxpr
    known: dict[Any, tuple[Any, bool]] = {}
    known |= zip(jaxpr.constvars, ((const, False) for const in program.consts), strict=True)
    known |= zip(jaxpr.invars, zip(arguments, from_input, strict=True), strict=True)

    def read(atom: Any) -> tuple[Any, bool]:
        return (atom.val, False) if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        values, origins = [value for value, _ in operands], [origin for _, origin in operands]
        if eqn.primitive is dot_general_p:
            results = [(_product(values, origins, eqn.params, multiply), any(origins))]
        elif _is_ragged(eqn):
            results = [(_ragged(values, eqn.params, multiply), any(origins))]
        elif eqn.primitive is jit_p and _has_product(eqn.params["jaxpr"]):
            results = _evaluate(eqn.params["jaxpr"], values, multiply, origins)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            made = eqn.primitive.bind(*values, **params)
            made = made if eqn.primitive.multiple_results else [made]
            results = [(value, any(origins)) for value in made]
        known |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _ragged(
    values: list[Any], params: dict[str, Any], multiply: Callable[..., jax.Array]
) -> jax.Array:
    """One ragged_dot; its kernels are on the right by themselves."""
    lhs, rhs, sizes = values
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    return multiply(lhs, rhs, None, group_sizes=sizes, **options)


def _product(
    values: list[Any],
    origins: list[bool],
    params: dict[str, Any],
    multiply: Callable[..., jax.Array],
) -> jax.Array:
    """One dot_general, with the kernel on the right as everywhere."""
    (lhs, rhs), params = values, dict(params)
    contracting, batch = params.pop("dimension_numbers")
    swapped = origins == [False, True]
    if not swapped:
        return multiply(lhs, rhs, (contracting, batch), **params)
    product = multiply(rhs, lhs, (contracting[::-1], batch[::-1]), **params)
    # [batch, kept of rhs, kept of lhs] to [batch, kept of lhs, kept of rhs].
    start, kept_right = len(batch[0]), rhs.ndim - len(batch[1]) - len(contracting[1])
    return jnp.moveaxis(
        product,
        range(start, start + kept_right),
        range(product.ndim - kept_right, product.ndim),
    )
