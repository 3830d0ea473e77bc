"""Handlers where a program has one CPU device, and plain JAX everywhere else."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

from mx_jax.backends.cpu_ffi.handler import alone
from mx_jax.backends.one_device import Ways, committed_devices, is_traced

# What takes a handler or plain JAX, as `lax.platform_dependent` does, which stands where this is
# None. Part of jit's cache key.
dispatch = jax.make_user_context(default_value=None)


def deciding_at_lowering(run: Callable[..., Any], *operands: Any) -> Any:
    """What an offer runs, where only lowering tells whether the program has one device."""
    with dispatch(by_devices):
        return run(*operands)


def by_devices(*operands: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """`cpu(*operands)` on one CPU device, `default(*operands)` on anything else.

    Neither closes over arrays.
    """
    leaves = jax.tree.leaves(operands)
    with dispatch(None):
        if is_traced(leaves):
            return Ways("cpu", cpu, default, _by_itself)(*operands)
        if len(committed_devices(leaves)) > 1:
            return default(*operands)
        return lax.platform_dependent(*operands, cpu=cpu, default=default)


@contextlib.contextmanager
def _by_itself() -> Iterator[None]:
    with dispatch(None), alone(True):
        yield
