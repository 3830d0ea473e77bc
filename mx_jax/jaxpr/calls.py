"""A call of a function of any pytrees as a program of its arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# A leaf that is no array, with its type, and a float with its text; None stands for an array.
Constant = tuple[Any, type, str] | None


@dataclasses.dataclass(frozen=True)
class Static:
    """What of a call is no array, equal to what nothing can tell from it: True is not 1.

    Attributes:
      structure: of `(args, kwargs)`.
      constants: for each leaf.
    """

    structure: Any
    constants: tuple[Constant, ...]

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with other arrays."""
        left = iter(arrays)
        leaves = [next(left) if own is None else own[0] for own in self.constants]
        return jax.tree.unflatten(self.structure, leaves)


def is_array(leaf: object) -> bool:
    """Whether a leaf has a shape and a dtype."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def split(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Static, list[Any]]:
    """A call as what of it is no array, and its arrays."""
    # Flags such as `train=True`, strings and functions have to stay Python values under a trace.
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    constants: list[Constant] = []
    for leaf in leaves:
        text = repr(leaf) if isinstance(leaf, float | complex) else ""
        constants.append(None if is_array(leaf) else (leaf, type(leaf), text))
    return Static(structure, tuple(constants)), [leaf for leaf in leaves if is_array(leaf)]


def of_arrays(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A call as a function of the list of its arrays alone, and that list."""
    static, arrays = split(args, kwargs)

    def call(arrays: Sequence[Any]) -> Any:
        own_args, own_kwargs = static.arguments(arrays)
        return function(*own_args, **own_kwargs)

    return call, arrays


def traced(
    function: Callable[..., Any], static: Static, arrays: Sequence[Any]
) -> tuple[ClosedJaxpr, Callable[[Sequence[Any]], Any]]:
    """The program of a call, and what makes the call's result of the program's: a tree that may
    hold what is no array."""
    found: list[tuple[Any, list[Any]]] = []

    def call(arrays: Sequence[Any]) -> list[Any]:
        args, kwargs = static.arguments(arrays)
        results, structure = jax.tree.flatten(function(*args, **kwargs))
        found[:] = [(structure, [None if is_array(leaf) else leaf for leaf in results])]
        return [leaf for leaf in results if is_array(leaf)]

    program = jax.make_jaxpr(call)(arrays)
    ((structure, leaves),) = found

    def result(values: Sequence[Any]) -> Any:
        left = iter(values)
        return jax.tree.unflatten(structure, [next(left) if x is None else x for x in leaves])

    return program, result
