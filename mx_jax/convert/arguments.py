"""A call's arguments: its arrays, which are traced, and the rest, which a trace is made for."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

R = TypeVar("R")
# Positions and names of arguments.
Arguments = tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class _Constant:
    """What is no array, equal to what nothing can tell from it: True is not 1, 0.0 not -0.0."""

    value: Any
    kind: type
    text: str


@dataclasses.dataclass(frozen=True)
class Static:
    """All of a call but its arrays.

    Attributes:
      structure: of `(args, kwargs)`.
      constants: each leaf that is no array, None for one.
      data: for each array, whether it is data, or in an argument that holds weights.
    """

    structure: Any
    constants: tuple[_Constant | None, ...]
    data: tuple[bool, ...]

    def call(self, function: Callable[..., R], arrays: Sequence[Any]) -> R:
        """The function's result.

        Args:
          function: what is called.
          arrays: in the places of the call's own.
        """
        given = iter(arrays)
        leaves = [next(given) if own is None else own.value for own in self.constants]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return function(*args, **kwargs)


def split(
    function: Callable[..., Any], weights: Arguments, args: Any, kwargs: dict[str, Any]
) -> tuple[Static, list[Any]]:
    """A call's arrays, and the rest.

    Args:
      function: what is called.
      weights: positions and names of the arguments that hold weights.
      args: by position.
      kwargs: by name.

    Raises:
      ValueError: weights that name an argument that is not there.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    constants = [
        None
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        else _Constant(leaf, type(leaf), repr(leaf) if isinstance(leaf, float | complex) else "")
        for leaf in leaves
    ]
    data = jax.tree.leaves(_data(function, weights, args, kwargs))
    kept = [own for own, constant in zip(data, constants, strict=True) if constant is None]
    arrays = [leaf for leaf, own in zip(leaves, constants, strict=True) if own is None]
    return Static(structure, tuple(constants), tuple(kept)), arrays


def _data(function: Callable[..., Any], weights: Arguments, args: Any, kwargs: Any) -> Any:
    """The arguments with True in the place of each leaf that is data, else False."""
    names = _parameters(function)
    called = [
        *((i, {i, names[i]} if i < len(names) else {i}) for i in range(len(args))),
        *((name, {name, *([names.index(name)] if name in names else [])}) for name in kwargs),
    ]
    unknown = set(weights) - set[int | str]().union(*(known for _, known in called))
    if unknown:
        raise ValueError(
            f"convert.function: weights={weights!r} names arguments that {name_of(function)} was "
            f"not called with: {', '.join(map(repr, unknown))}; it was called with {len(args)} "
            f"positional arguments and {sorted(kwargs)}"
        )
    isdata = {where: known.isdisjoint(weights) for where, known in called}
    marked = [jax.tree.map(lambda _, i=i: isdata[i], arg) for i, arg in enumerate(args)]
    return tuple(marked), {
        name: jax.tree.map(lambda _, name=name: isdata[name], arg) for name, arg in kwargs.items()
    }


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of a function's arguments that may be given by position."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Some functions written in C have none.
        return []
    return [
        own.name for own in found if own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)
    ]


def takes_rngs(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument of its own called `rngs`."""
    try:
        return "rngs" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def name_of(function: Callable[..., Any]) -> str:
    """What errors and profiles call a function."""
    return getattr(function, "__name__", type(function).__name__)
