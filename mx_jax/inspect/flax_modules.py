"""The names of Flax's modules, and the index of layers in Flax's scans, while a capture runs.

`nn.scan` and `nnx.scan` have no place for a counter, and linen's traces its body once more before
it scans: callbacks in there would run twice, and newer versions of Flax refuse them. So Flax's
modules get a `jax.lax.scan` that gives its body the index while a capture runs, and a first trace
in which none does. `inspect.tag(index=)` cannot stand in for the latter.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import axes_scan
from flax.linen.module import InterceptorContext
from flax.nnx.transforms import iteration as nnx_iteration
from jax import lax

from mx_jax.ops.tags import iteration, watching, within

C = TypeVar("C")
R = TypeVar("R")
P = ParamSpec("P")


def _named(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: InterceptorContext,
) -> Any:
    if not watching.value or context.module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    with within(context.module.path):
        return call(*args, **kwargs)


class _Instead:
    """A module with other values for some of its names."""

    def __init__(self, module: object, **values: object):
        self._module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _scan(
    f: Callable[[C, Any], tuple[C, Any]],
    init: C,
    xs: object = None,
    length: int | None = None,
    **options: Any,
) -> tuple[C, Any]:
    """`jax.lax.scan`, whose body knows its index."""
    if not watching.value:
        return lax.scan(f, init, xs, length, **options)
    count = jax.tree.leaves(xs)[0].shape[0] if length is None else length

    def body(carry: C, indexed: tuple[Any, jax.Array]) -> Any:
        own, index = indexed
        with iteration(index):
            return f(carry, own)

    return lax.scan(body, init, (xs, jnp.arange(count)), length, **options)


def _uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which no capture runs."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with watching(()):
            return function(*args, **kwargs)

    return run


_LAX: Any = _Instead(lax, scan=_scan)
_PE: Any = vars(axes_scan)["pe"]
# What linen traces a body with before it scans; which one it is depends on its version.
_TRACES = {"trace_to_jaxpr_nounits", "trace_to_jaxpr_dynamic"} & {*dir(_PE)}
# Where Flax calls it: the module, the name there, and what it is to be.
_PLACES: tuple[tuple[Any, str, Any], ...] = (
    (axes_scan, "lax", _LAX),
    (axes_scan, "pe", _Instead(_PE, **{x: _uncaptured(getattr(_PE, x)) for x in _TRACES})),
    (nnx_iteration, "jax", _Instead(jax, lax=_LAX)),
)
_lock = threading.Lock()
_patches = contextlib.ExitStack()
_count = 0


@contextlib.contextmanager
def named_layers() -> Iterator[None]:
    """A context in which each linen module names what runs in it, as nnx's layers do by themselves,
    and Flax's scans count their layers; contexts may overlap."""
    _change(+1)
    try:
        with nn.intercept_methods(_named):
            yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global _count
    with _lock:
        before, _count = _count, _count + by
        if not before:
            for module, name, value in _PLACES:
                _patches.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
        elif not _count:
            _patches.close()
