"""The index of layers in Flax's scans, for the products that run in them.

`nn.scan` and `nnx.scan` have no place for a counter, and their bodies cannot tell which slice they
got. So Flax's modules are given a `jax.lax.scan` that hands its body the index while somebody
watches, and that is JAX's own otherwise.
"""

import contextlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import axes_scan
from flax.nnx.transforms import iteration as nnx_iteration
from jax import lax

from mx_jax.ops.tags import iteration, watching

_PE: Any = vars(axes_scan)["pe"]


class _Instead:
    """A module with other values for some of its names."""

    def __init__(self, module: ModuleType, **values: Any):
        self._module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _scan(f: Any, init: Any, xs: Any = None, length: int | None = None, **options: Any) -> Any:
    """`jax.lax.scan`, whose body knows its index."""
    if not watching.value:
        return lax.scan(f, init, xs, length, **options)
    leaves = jax.tree.leaves(xs)
    count = leaves[0].shape[0] if length is None else length

    def body(carry: Any, given: tuple[Any, jax.Array]) -> Any:
        own, index = given
        with iteration(index):
            return f(carry, own)

    return lax.scan(body, init, (xs, jnp.arange(count)), length, **options)


def _unwatched(function: Any) -> Any:
    """A function in which nobody watches."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with watching(()):
            return function(*args, **kwargs)

    return run


def _tracing() -> Any:
    """What linen looks at a body with, before it scans: what is told there would be told besides,
    and newer versions of Flax take it for a result."""
    names = ("trace_to_jaxpr_nounits", "trace_to_jaxpr_dynamic")
    own = {name: getattr(_PE, name) for name in names if hasattr(_PE, name)}
    return _Instead(_PE, **{name: _unwatched(value) for name, value in own.items()})


_LAX: Any = _Instead(lax, scan=_scan)
# Where Flax calls it: the module, the name there, and what it is to be.
_PLACES: tuple[tuple[Any, str, Any], ...] = (
    (axes_scan, "lax", _LAX),
    (axes_scan, "pe", _tracing()),
    (nnx_iteration, "jax", _Instead(jax, lax=_LAX)),
)
_lock = threading.Lock()
_entered: list[contextlib.ExitStack] = []
_count = 0


@contextlib.contextmanager
def counted_scans() -> Iterator[None]:
    """A context in which Flax's scans tell the index of their layers; contexts may overlap."""
    _change(+1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global _count
    with _lock:
        before, _count = _count, _count + by
        if not before:
            _entered.append(_put())
        elif not _count:
            _entered.pop().close()


def _put() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for module, name, value in _PLACES:
        stack.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, value)
    return stack
