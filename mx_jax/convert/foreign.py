"""Layers that call jax.numpy themselves: their traced call, with its products made anew.

A layer without an attribute to set (somebody's own Einsum, `x @ kernel`) is traced to a jaxpr, and
the jaxpr is run with every dot_general in the hands of a recipe. Only a rule that names the layer's
type does this, and only to a layer without submodules: its products are then its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import dot_general_p, jit_p

from mx_jax.inspect.abstract import of_arrays


def with_products(
    function: Callable[..., Any],
    multiply: Callable[..., jax.Array],
    name: str,
    *,
    strict: bool = True,
) -> Callable[..., Any]:
    """A function whose dot_generals, those inside a jit included, are made by another.

    Args:
      function: of arrays and of values that stay what they are, such as subscripts.
      multiply: called like `jax.lax.dot_general`, by keyword after the dimension numbers, with the
        kernel on the right: an operand that no argument of the function goes into.
      name: for errors.
      strict: whether a function without dot_general is an error.

    Returns:
      A function of the same arguments.

    Raises:
      ValueError: when called, if there is no dot_general; with strict.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        flat, arrays = of_arrays(function, *args, **kwargs)
        program, shape = jax.make_jaxpr(flat, return_shape=True)(arrays)
        if strict and not _has_product(program):
            raise ValueError(
                f"convert: a rule names the type of {name}, but its call contains no dot_general; "
                "its products may be in a loop, or there are none: drop the type from the rule"
            )
        results = _evaluate(program, arrays, multiply, [True] * len(arrays))
        return jax.tree.unflatten(jax.tree.structure(shape), [value for value, _ in results])

    return run


def _has_product(program: ClosedJaxpr) -> bool:
    return any(
        eqn.primitive is dot_general_p
        or (eqn.primitive is jit_p and _has_product(eqn.params["jaxpr"]))
        for eqn in program.jaxpr.eqns
    )


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
        elif eqn.primitive is jit_p and _has_product(eqn.params["jaxpr"]):
            results = _evaluate(eqn.params["jaxpr"], values, multiply, origins)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            made = eqn.primitive.bind(*values, **params)
            made = made if eqn.primitive.multiple_results else [made]
            results = [(value, any(origins)) for value in made]
        known |= zip(eqn.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


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
