"""Tensors before and after quantization, or statistics of them, from programs as they run."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from mx_jax.inspect.capture_context import ARRAYS, Capture, Filter
from mx_jax.inspect.capture_statistics import STATISTICS
from mx_jax.inspect.sinks import Memory, Sink
from mx_jax.ops.tags import moment, watching


def capture(
    filter: str | Filter | None = None,
    *,
    stats: str | Collection[str] = STATISTICS,
    every: int = 1,
    step: Any = None,
    sink: Sink | Sequence[Sink] | None = None,
) -> Capture:
    """A context in which products tell what quantization does to their operands.

    Each operand that is quantized gives one record, forward and backward, and so does each product:
    under `jit`, `grad`, `vmap` (lanes are one operand), `scan`, `jax.checkpoint` (what is computed
    again is not told again), `shard_map` and with sharded inputs. Products are named by Flax's
    modules or by `tag`. A function that `jit` compiled before is compiled again. While no capture
    is entered, nothing of this is in a program.

    Statistics are computed where the arrays are. They are:

    - `"amax"`, of the finite values;
    - `"scales"`: how many scales have which exponent;
    - `"underflow"`, `"saturation"`: shares of values that became zero, or the largest code though
      they are larger;
    - `"nonfinite"`: blocks with Inf or NaN, and blocks in all;
    - `"sqnr"`: signal to quantization noise, in dB;
    - `"channels"`: the largest amaxes along the axis of the blocks, and the first over the median;
    - `"error"`, of products: `|exact - actual| / |exact|` and their cosine, where exact is the
      product of the same operands in float32; of gradients too. A large product is compared in a
      fixed sample of its entries, `compared` of `entries`: the rows and columns at an odd distance,
      at most 128 of each, so that one of 128 by 128 is compared as a whole;
    - `"arrays"`, only if named: the values before and after, whole on one device, even where they
      are sharded. Below `shard_map` each device gives a record with its part, and `Record.shard`
      says which. Products are then compared as a whole.

    Of an operand that came quantized, such as a stored weight, the rule is `"stored"`. It has no
    `underflow`, `saturation`, `sqnr` and `before`: what it was, nothing says. The error of its
    product is that of the other operand's cast.

    Args:
      filter: a regular expression for whole paths, or a function of a `Tag`; None: all. One that
        matched nothing is warned of in the end.
      stats: names of statistics, or one.
      every: every how many steps; more than 1 needs the step.
      step: of training, an integer that may be traced, for a capture that is entered at each step;
        `at_step` tells it to one that is entered once. Without either every call counts.
      sink: where records go, one or several; None: a `Memory`.

    Returns:
      A context, which gives the sink.

    Raises:
      ValueError: a statistic that there is not, every less than 1, or a filter that is no regular
        expression.
      TypeError: a filter or a sink that is none.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> @jax.jit
      ... def loss(w, x):
      ...     with mx_jax.inspect.tag("head"):
      ...         return mx_jax.matmul(x, w, recipe="mxfp4").sum()
      >>> x = jax.random.normal(jax.random.key(0), (32, 64))
      >>> with mx_jax.inspect.capture(stats="amax") as records:
      ...     _ = loss(jnp.ones((64, 32)), x)
      >>> for tag in records:
      ...     print(tag)
      head output lhs mxfp4 even axis -1
      head output rhs mxfp4 even axis -2
    """
    names = frozenset((stats,) if isinstance(stats, str) else stats)
    unknown = names - {*STATISTICS, ARRAYS}
    if unknown:
        raise ValueError(
            f"capture: stats must be some of {', '.join((*STATISTICS, ARRAYS))}, got "
            f"stats={sorted(unknown)}"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"capture: every must be an integer of at least 1, got every={every!r}")
    return Capture(
        filter=as_filter(filter, "capture"),
        given=filter,
        stats=names,
        every=every,
        step=step,
        sinks=_sinks(sink),
    )


def _sinks(sink: Sink | Sequence[Sink] | None) -> Sequence[Sink]:
    """Where records go, one or several.

    Raises:
      TypeError: no sink.
    """
    if sink is None:
        return (Memory(),)
    sinks = sink if isinstance(sink, Sequence) else (sink,)
    if not sinks or not all(hasattr(own, "write") and hasattr(own, "close") for own in sinks):
        raise TypeError(
            "capture: sink must be a sink or several, each with write(record) and close(), got "
            f"sink={sink!r}; for a file write sink=inspect.Jsonl(path)"
        )
    return sinks


def as_filter(filter: str | Filter | None, operation: str) -> Filter:
    """A function of a tag.

    Raises:
      ValueError: no regular expression.
      TypeError: a filter that is none.
    """
    if filter is None:
        return lambda tag: True
    if isinstance(filter, str):
        try:
            pattern = re.compile(filter)
        except re.error as error:
            raise ValueError(
                f"{operation}: filter must be a regular expression for whole paths, got "
                f"filter={filter!r}: {error}; re.escape makes one of a path"
            ) from error
        return lambda tag: pattern.fullmatch(tag.path) is not None
    if not callable(filter):
        raise TypeError(
            f"{operation}: filter must be a regular expression for paths, a function of a Tag or "
            f"None, got filter={filter!r}"
        )
    return filter


def scalar(name: str, value: Any) -> None:
    """Tell a number of a step, such as the loss, to the captures in context.

    Args:
      name: what it is.
      value: a scalar, traced or not. No gradient passes. Below `shard_map` the first device tells
        its own: sum or average it over devices before.

    Raises:
      ValueError: not a scalar.

    Examples:
      >>> import jax, mx_jax
      >>> with mx_jax.inspect.capture() as records:
      ...     jax.jit(lambda x: mx_jax.inspect.scalar("loss", x * 2))(1.5)
      >>> print(*(number.value for number in records.scalars["loss"]))
      3.0
    """
    if jnp.shape(value) != ():
        raise ValueError(f"scalar: {name!r} must be a scalar, got shape={jnp.shape(value)}")
    for watcher in watching.value:
        watcher.send_scalar(name, lax.stop_gradient(jnp.asarray(value)), moment())
