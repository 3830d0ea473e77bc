"""Calls as functions of their arrays alone, to be traced without computing."""

from collections.abc import Callable
from typing import Any

import jax


def of_arrays(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """A call as a function of the list of its arrays, and that list.

    Flags such as `train=True` have to stay Python values under a trace; so do strings and
    functions.

    Args:
      function: what is called.
      *args: its arguments; arrays, those in pytrees too, may be `jax.ShapeDtypeStruct`.
      **kwargs: likewise.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from mx_jax.inspect.abstract import of_arrays
      >>> jax.eval_shape(*of_arrays(jnp.sum, jnp.ones((2, 3)), axis=0)).shape
      (3,)
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        given = iter(arrays)
        merged = [next(given) if own else leaf for leaf, own in zip(leaves, traced, strict=True)]
        own_args, own_kwargs = jax.tree.unflatten(tree, merged)
        return function(*own_args, **own_kwargs)

    return call, [leaf for leaf, own in zip(leaves, traced, strict=True) if own]
