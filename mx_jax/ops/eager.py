"""One program for what is computed outside of any trace."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def one_program(*static: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates what is computed by one `jit` of its own where nothing is traced.

    A trace gets its equations as they are: under a `jit` of their own they would lose their names
    (inlined), or take many lines of the jaxpr (not inlined).

    Args:
      static: names of static parameters.
    """

    def decorate(compute: Callable[..., Any]) -> Any:
        jitted = jax.jit(compute, static_argnames=static)

        @functools.wraps(compute)
        def run(*given: Any, **named: Any) -> Any:
            leaves = jax.tree.leaves((given, named))
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
            return (compute if traced else jitted)(*given, **named)

        return run

    return decorate
