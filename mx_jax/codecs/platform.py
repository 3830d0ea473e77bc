"""One of several implementations, by the platform that a program is lowered for."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax

R = TypeVar("R")

# `lowered_for.value` is the platform while a call is lowered, else None.
lowered_for: Any = jax.make_user_context(default_value=None)


def platform_dependent(*operands: Any, default: Callable[..., R], **named: Callable[..., R]) -> R:
    """`lax.platform_dependent`, which traces one implementation where the platform is known."""
    if lowered_for.value is None:
        return lax.platform_dependent(*operands, default=default, **named)
    return named.get(lowered_for.value, default)(*operands)
