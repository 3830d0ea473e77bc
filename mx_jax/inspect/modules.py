"""Paths of flax.linen's modules, for the products that run in them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
from flax.linen.module import InterceptorContext

from mx_jax.ops.tags import watching, within


def module_paths() -> AbstractContextManager[Any]:
    """A context in which each linen module names what runs in it; nnx names layers by itself."""
    return nn.intercept_methods(_named)


def _named(call: Callable[..., Any], args: Any, kwargs: Any, context: InterceptorContext) -> Any:
    if not watching.value or context.module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    with within(context.module.path):
        return call(*args, **kwargs)
