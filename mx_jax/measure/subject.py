"""What a case's process measures: the kernel, what it is compared with, and whether it is right."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends import evidence
from mx_jax.backends.calls import Call
from mx_jax.backends.select import Choice, current_target, find
from mx_jax.backends.target import Backend
from mx_jax.measure.timing import Way

KERNEL, PLAIN, UNPACKING, BFLOAT16 = "kernel", "plain path", "unpacking first", "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """All that a case needs, once its arrays are made.

    Attributes:
      ways: to compute the same; `KERNEL` and `PLAIN` are among them.
      error: the largest error of what the timed kernel gave, a list of one for each copy, over what
        is allowed; infinity where only the same bits are right, and they are not.
      elsewhere: checks of what else the row stands for, each an error over what is allowed.
    """

    ways: Mapping[str, Way]
    error: Callable[[list[Any]], float]
    elsewhere: Sequence[Callable[[], float]] = ()


def plain_path(call: Call) -> Choice | None:
    """What computes a call without any evidence."""
    with evidence.use(()):
        return find(call, current_target(1))


def kernel_of(backend: Backend, call: Call) -> Callable[..., Any]:
    """A backend's own way, whatever selection would say.

    Raises:
      ValueError: it does not take the call.
    """
    target = current_target(1)
    reason = backend.rejects(call, target)
    if reason is not None:
        raise ValueError(f"gpu: {backend.name} does not take this on {target}: {reason}")
    return backend.offers[type(call)].run


def same_bits(left: Any, right: Any) -> bool:
    """Whether two pytrees of arrays have the same bits, decided where they lie."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(bool(_same(a, b)) for a, b in pairs)


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape != b.shape or a.dtype != b.dtype:
        return jnp.bool_(False)
    width = np.dtype(f"uint{8 * a.dtype.itemsize}")
    return jnp.all(lax.bitcast_convert_type(a, width) == lax.bitcast_convert_type(b, width))
