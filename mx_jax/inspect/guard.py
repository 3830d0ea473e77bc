"""Stopping at the first block that is not finite."""

import contextlib
from collections.abc import Iterator
from typing import Any

from mx_jax.inspect.capture import as_filter
from mx_jax.inspect.capture_context import Capture, Filter
from mx_jax.inspect.capture_record import Record, Scalar


class NonFiniteError(FloatingPointError):
    """A block that was to be quantized has Inf or NaN in it.

    Attributes:
      record: the first, in the order of the program.

    Examples:
      >>> from mx_jax.inspect import NonFiniteError, Record, Tag
      >>> operand = {"side": "lhs", "axis": -1, "format": "mxfp8_e4m3", "rule": "rceil"}
      >>> tag = Tag(path="head", product="output", **operand)
      >>> stats = {"nonfinite_blocks": 1, "blocks": 8}
      >>> raise NonFiniteError(Record(tag=tag, step=7, stats=stats))
      Traceback (most recent call last):
      mx_jax.inspect.guard.NonFiniteError: guard: a block must be finite to be quantized, ...
    """

    def __init__(self, record: Record):
        self.record = record
        stats, tag = record.stats, record.tag
        super().__init__(
            f"guard: a block must be finite to be quantized, got Inf or NaN in "
            f"nonfinite_blocks={stats['nonfinite_blocks']} of blocks={stats['blocks']} at "
            f"step={record.step}, in the {tag.tensor} of {tag.product}, path={record.path!r} "
            f"({tag.format}, {tag.rule}, axis={tag.axis}); look at what comes before it with "
            "inspect.capture, and lower the learning rate or keep this layer in high precision"
        )


class _Guard:
    """A sink that keeps the first bad record, and stops what runs once its step is over."""

    def __init__(self):
        self.first: Record | None = None

    def write(self, record: Record | Scalar) -> None:
        if isinstance(record, Scalar):
            return
        first = self.first
        if first is not None and record.step > first.step:
            raise NonFiniteError(first)
        if not record.stats["nonfinite_blocks"]:
            return
        if first is None or (record.step, record.order) < (first.step, first.order):
            self.first = record

    def close(self) -> None:
        """Nothing ends."""


class _Watch(Capture):
    """A capture that stops a step that is told around it as soon as it is over."""

    unmatched = "guard", "nothing was guarded"

    @contextlib.contextmanager
    def told(self, step: int) -> Iterator[None]:
        """A context of a step; what still ran in it has been told at its end."""
        with super().told(step):
            yield
        for sink in self.sinks:
            if isinstance(sink, _Guard) and sink.first is not None:
                raise NonFiniteError(sink.first)


@contextlib.contextmanager
def guard(filter: str | Filter | None = None, *, step: Any = None) -> Iterator[None]:
    """A context that raises at the first block with Inf or NaN in it that is to be quantized.

    Forward products come before their gradients, and the step is over before it raises: so what is
    named is where it begins, not what tells first. With `at_step` around the compiled function that
    is the end of the bad step. Otherwise the next step is stopped, of which JAX logs an error; or
    the context raises at its end.

    Args:
      filter: as `capture` takes it.
      step: as `capture` takes it; without one, or `at_step`, calls are counted.

    Raises:
      NonFiniteError: with the record, which has tag and step.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> x = jnp.ones((4, 64)).at[1, 40].set(jnp.inf)
      >>> with mx_jax.inspect.guard(), mx_jax.inspect.tag("mlp"):
      ...     _ = mx_jax.matmul(x, jnp.ones((64, 8)), recipe="mxfp8")
      Traceback (most recent call last):
      mx_jax.inspect.guard.NonFiniteError: guard: a block must be finite to be quantized, got ...
    """
    sink = _Guard()
    watch = _Watch(
        filter=as_filter(filter, "guard"),
        given=filter,
        stats=frozenset({"nonfinite"}),
        every=1,
        step=step,
        sinks=(sink,),
    )
    try:
        with watch:
            yield
    except NonFiniteError:
        raise
    except Exception as error:
        # JAX wraps what a callback raises in an error of its own.
        if sink.first is not None:
            raise NonFiniteError(sink.first) from error
        raise
    if sink.first is not None:
        raise NonFiniteError(sink.first)
