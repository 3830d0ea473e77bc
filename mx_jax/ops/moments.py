"""Who watches a program, at which step of training, in which layer of a scan.

While nobody watches, none of this is in a program or in jit's key.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("step", "index"), meta_fields=("told",)
)
@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """What is known only while the program runs.

    Attributes:
      step: of training, int32, or None.
      index: of the layer, int32, for each loop in context, outermost first.
      told: whether the step is told outside the program, to those whom it concerns.
    """

    step: jax.Array | None = None
    index: tuple[jax.Array, ...] = ()
    told: bool = False


# All in jit's cache key: what was traced unwatched, elsewhere or for other watchers is not reused.
watching: Any = jax.make_user_context(default_value=())
# Traced values cannot be in a key: a number stands for them.
_moment_key: Any = jax.make_user_context(default_value=None)
_moment: contextvars.ContextVar[Moment | None] = contextvars.ContextVar("moment", default=None)
_EAGER = get_opaque_trace_state()
# The order of what traces meet.
numbers = itertools.count()


def moment() -> Moment:
    """Step and index in context."""
    return _moment.get() or Moment()


def eager() -> bool:
    """Whether nothing traces."""
    return get_opaque_trace_state() == _EAGER


@contextlib.contextmanager
def at(new: Moment, value: Any) -> Iterator[None]:
    """A context with another moment, of which a value is new: a number, or what stands for it."""
    traced = isinstance(value, Tracer)
    key = next(numbers) if traced else value if isinstance(value, str) else int(value)
    token = _moment.set(new)
    try:
        with _moment_key((_moment_key.value, key)):
            yield
    finally:
        _moment.reset(token)


@contextlib.contextmanager
def at_step(step: Any) -> Iterator[None]:
    """A context whose products belong to a step of training: what `capture` tells the step by.

    While nobody watches, it does nothing, so it may stay where it is written:

    - around the call of the function that `jit` compiles, if the step is known there. A step that
      nobody looks at runs the program that runs while nobody watches, and costs what that costs;
      one that is looked at is waited for. Both are compiled once.
    - inside that function, with a step that is traced: one program for all steps, with a condition
      for each product. A number that is not traced becomes a part of the program there, which is
      compiled again for the next.

    Args:
      step: integer scalar, traced or not.

    Raises:
      TypeError: not an integer scalar.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> loss = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8").sum())
      >>> with mx_jax.inspect.capture(every=10) as records:
      ...     for step in range(25):
      ...         with mx_jax.inspect.at_step(step):
      ...             _ = loss(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> sorted({record.step for record in records.all()})
      [0, 10, 20]
    """
    check_scalar(step, "at_step", "step")
    if not watching.value:
        yield
    elif eager() and not isinstance(step, Tracer):
        with _told(int(step)):
            yield
    else:
        value = jnp.asarray(step, jnp.int32)
        with at(dataclasses.replace(moment(), step=value, told=False), value):
            yield


@contextlib.contextmanager
def _told(step: int) -> Iterator[None]:
    """A context of a step that is told to those whom it concerns; others do not watch in it."""
    watchers = tuple(watcher for watcher in watching.value if watcher.looks_at(step))
    with watching(watchers), contextlib.ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.told(step))
        if watchers:
            # The step is in no key: programs are the same for all that are looked at.
            stack.enter_context(at(dataclasses.replace(moment(), step=None, told=True), "told"))
            # What still runs tells it before the next step begins.
            stack.callback(jax.effects_barrier)
        yield


def check_scalar(value: Any, operation: str, what: str) -> None:
    """Raise TypeError if a value is no integer scalar."""
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{operation}: {what} must be an integer scalar, got {what} of dtype={dtype}, "
            f"shape={shape}"
        )
