"""Backends that a context names: asked alone, asked first, or added to the table."""

from contextlib import AbstractContextManager

import jax

from mx_jax.backends.base import Backend
from mx_jax.backends.table import BACKENDS

# Overrides enter the jit cache key: a function traced under one backend is not reused for another.
only = jax.make_user_context(default_value=None)
preferred = jax.make_user_context(default_value=())
added = jax.make_user_context(default_value=())


def only_backend(name: str | None) -> AbstractContextManager[None]:
    """A context in which only the named backend is asked, and what it rejects is an error.

    For tests and for measuring one backend. It enters jit's cache key.

    Args:
      name: of a backend, as `inspect.explain` prints it; None lifts an outer restriction.

    Returns:
      The context manager.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> with mx_jax.only_backend("reference"):
      ...     mx_jax.quantize(jnp.ones(32), "mxfp4").shape
      (32,)
    """
    if name is not None:
        _check_known("only_backend", name)
    return only(name)


def prefer_backends(*names: str) -> AbstractContextManager[None]:
    """A context in which the named backends are asked first, and all others after them.

    What they reject goes to the next, as it always does. This is how to use a backend that stands
    behind the reference, such as the GPU kernels, where nothing was measured of it, or whatever was
    measured. It enters jit's cache key.

    Args:
      names: of backends, in order of preference; none lifts an outer preference.

    Returns:
      The context manager.

    Raises:
      ValueError: unknown name; the message lists the known.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.ones((4, 32)), "mxfp4")
      >>> with mx_jax.prefer_backends("pallas_gpu", "cudnn"):
      ...     mx_jax.matmul(x, jnp.ones((32, 2)), recipe=mx_jax.recipes.mxfp4()).shape
      (4, 2)
    """
    for name in names:
        _check_known("prefer_backends", name)
    return preferred(names)


def with_backends(*backends: Backend) -> AbstractContextManager[None]:
    """A context with more backends than the table's, asked before those.

    For trying a backend, or one that belongs to another package. It enters jit's cache key.

    Args:
      backends: in order of preference, of other names than the table's; none lifts an outer
        addition.

    Returns:
      The context manager.

    Raises:
      ValueError: a name that is taken.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax.backends.base import Backend, Offer
      >>> from mx_jax.backends.calls import DequantizeCall
      >>> from mx_jax.backends.select import with_backends
      >>> zeros = Offer(
      ...     call=DequantizeCall,
      ...     rejects=lambda call, target: None if call.shape == (32,) else "needs 32 values",
      ...     run=lambda x, call: jnp.zeros(x.shape, call.dtype),
      ... )
      >>> with with_backends(Backend(name="zeros", epsilon_bound=0.0, table=(zeros,))):
      ...     mx_jax.cast(jnp.ones(32), "mxfp4").sum()
      Array(0., dtype=float32)
    """
    names = [backend.name for backend in (*backends, *BACKENDS)]
    taken = sorted({name for name in names if names.count(name) > 1})
    if taken:
        raise ValueError(f"with_backends: each backend needs a name of its own, got names={taken}")
    return added(backends)


def known_backends() -> tuple[Backend, ...]:
    """Those that `with_backends` adds, and the table's."""
    return (*added.value, *BACKENDS)


def _check_known(operation: str, name: str) -> None:
    known = [backend.name for backend in known_backends()]
    if name not in known:
        raise ValueError(f"{operation}: unknown backend name={name!r}; known: {', '.join(known)}")
