"""Tensors before and after quantization, or statistics of them, from a function as it runs.

The function's program is rewritten: behind each cast stands what observes it.
"""

import collections
import dataclasses
import functools
import math
import re
import threading
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from mx_jax.codecs.straight_through import refuse_derivative
from mx_jax.inspect import statistics
from mx_jax.inspect.observe import ARRAYS, Entry, Observation, Observed, State, entries_of
from mx_jax.inspect.records import Record, Records, Tag
from mx_jax.inspect.statistics import STATISTICS
from mx_jax.jaxpr import read
from mx_jax.jaxpr.read import live, parted
from mx_jax.jaxpr.rewrite import Plan, Rewritten

P = ParamSpec("P")
R = TypeVar("R")
# Of a pytree packed as words: its tree, and the shape and dtype of each leaf.
PackedLayout = tuple[Any, Sequence[tuple[tuple[int, ...], np.dtype]]]
IntScalar = int | np.integer | jax.Array
Filter = Callable[[Tag], bool]
_PATHS_IN_WARNING = 3
_EAGER = get_opaque_trace_state()
_UNKNOWN = -1


def capture(
    function: Callable[P, R],
    filter: str | Filter | None = None,
    *,
    stats: str | Collection[str] = STATISTICS,
    every: int = 1,
    step: Callable[P, IntScalar] | None = None,
) -> "Captured[P, R]":
    """A function that records what quantization does to the operands of its products.

    Each operand that is cast gives one record, forward and backward: under `jit`, `grad`, `vmap`
    (lanes are one operand), `scan`, `jax.checkpoint` (what is computed again is not recorded
    again), `shard_map` and with sharded inputs. So what is captured is a whole train step, with the
    gradient in it. Its program is traced as `jax.jit` does it, and rewritten: results are the same
    bits. What it does not use of a product is not recorded.

    Products are named by their scopes, as in `explain`: Flax's modules and `jax.named_scope`. In
    loops the index is counted. Modules of flax.nnx among the arguments are updated as by the
    function itself. Statistics are computed where the arrays are; `STATISTICS` says what there are.

    Args:
      function: what runs: a step, jitted or not. A call that is not due calls it as it is.
      filter: a regular expression for whole paths, or a function of a `Tag`; None: all. One that
        matches nothing is warned of.
      stats: names of statistics, or one.
      every: every how many steps.
      step: gives the step of a call from its arguments, as `lambda state, batch: state.step` does;
        where it is traced (the whole loop is compiled), `every` is a condition around the step.
        None: calls are counted.

    Returns:
      A function of the same arguments. Its `records` are `Records`; print them.

    Raises:
      ValueError: a statistic that there is not, every less than 1, or a filter that is no regular
        expression.
      TypeError: a filter that is none, or no function.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> @jax.jit
      ... def loss(w, x):
      ...     with jax.named_scope("head"):
      ...         return mx_jax.matmul(x, w, recipe="mxfp4").sum()
      >>> loss = mx_jax.inspect.capture(loss, stats="amax")
      >>> x = jax.random.normal(jax.random.key(0), (32, 64))
      >>> _ = loss(jnp.ones((64, 32)), x)
      >>> for tag in loss.records:
      ...     print(tag)
      head output lhs mxfp4 even axis -1
      head output rhs mxfp4 even axis -2
    """
    if not callable(function):
        raise TypeError(
            f"capture: needs a function, got {function!r}; capture(step) is called as step is"
        )
    names = frozenset((stats,) if isinstance(stats, str) else stats)
    known = (*(row.name for row in statistics.TABLE), ARRAYS)
    if unknown := names - {*known}:
        raise ValueError(
            f"capture: stats must be some of {', '.join(known)}, got stats={sorted(unknown)}"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"capture: every must be an integer of at least 1, got every={every!r}")
    return Captured(function, filter, names, every, step)


def _as_filter(filter: str | Filter | None) -> Filter:
    """Whether a tag is wanted."""
    if filter is None:
        return lambda tag: True
    if isinstance(filter, str):
        try:
            pattern = re.compile(filter)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                "capture: filter must be a regular expression for whole paths, got "
                f"filter={filter!r}: {error}; re.escape makes one of a path"
            ) from error
        return lambda tag: pattern.fullmatch(tag.path) is not None
    if not callable(filter):
        raise TypeError(
            "capture: filter must be a regular expression for paths, a function of a Tag or None, "
            f"got filter={filter!r}"
        )
    return filter


class Captured(Generic[P, R]):
    """What `capture` returns.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.inspect.capture(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp4"), every=2)
      >>> for _ in range(3):
      ...     _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> layer.records
      <Records: 4 of 2 tags, steps 0 to 2>
    """

    def __init__(
        self,
        function: Callable[P, R],
        filter: str | Filter | None,
        stats: frozenset[str],
        every: int,
        step: Callable[P, IntScalar] | None,
    ):
        functools.update_wrapper(self, function)
        self.function, self.filter, self.stats = function, filter, stats
        self.wants = _as_filter(filter)
        self.every, self.step_of = every, step
        self._records = Records()
        self._calls = 0
        self._counts: collections.Counter[Any] = collections.Counter()
        self._lock = threading.Lock()
        self._rule = Observation(stats, self._send)
        self._compiled = jax.jit(self._run, static_argnums=(0, 1))

    @property
    def records(self) -> Records:
        """What was recorded, once what was computed has arrived here."""
        jax.effects_barrier()
        return self._records

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        step = None if self.step_of is None else _as_step(self.step_of(*args, **kwargs))
        traced = get_opaque_trace_state() != _EAGER or isinstance(step, Tracer)
        if not traced:
            number = self._calls if step is None else int(step)
            self._calls += 1
            if number % self.every:
                return self.function(*args, **kwargs)
            step = jnp.int32(number)
        elif step is None and self.every > 1:
            raise ValueError(
                f"capture: every={self.every} needs the step where calls are traced; pass "
                "step=lambda *args: ..., which takes it from the arguments"
            )
        function, positional, keywords, update = _functional(self.function, args, kwargs)
        static, arrays = read.split(positional, keywords)
        run = self._run if traced else self._compiled
        return update(run(function, static, arrays, step))

    def _run(
        self,
        function: Callable[..., R],
        static: read.Static,
        arrays: list[Any],
        step: IntScalar | None,
    ) -> R:
        """The function's results, its program rewritten."""
        with parted(True):
            program, result = read.traced(function, static, arrays)
        program = live(program)
        arrays = [refuse_derivative(x, _refuse) for x in arrays]
        plan = self._plan(entries_of(program))
        state = State(jnp.int32(_UNKNOWN if step is None else step))

        def observed(arrays: list[Any]) -> list[Any]:
            return Rewritten(program, plan, self._rule)(arrays, state)

        def plain(arrays: list[Any]) -> list[Any]:
            return Rewritten(program, (), self._rule)(arrays, state)

        if self.every == 1 or not isinstance(step, Tracer):
            return result(observed(arrays))
        return result(lax.cond(step % self.every == 0, observed, plain, arrays))

    def _plan(self, entries: Sequence[Entry]) -> Plan:
        """What is wanted of the entries; if there are any and nothing is, it warns."""
        plan = [
            (entry.where, dataclasses.replace(entry, casts=casts))
            for entry in entries
            if (casts := tuple(x for x in entry.casts if self.wants(x[0])))
        ]
        if entries and not plan:
            refused = dict.fromkeys(tag.path for entry in entries for tag, _ in entry.casts)
            paths = ", ".join(repr(path) for path in list(refused)[:_PATHS_IN_WARNING])
            hint = "; a regular expression must match a whole path"
            warnings.warn(
                f"capture: the filter matched none of {len(refused)} paths, so there is no record; "
                f"got filter={self.filter!r} and paths {paths}"
                f"{hint if isinstance(self.filter, str) else ''}",
                stacklevel=2,
            )
        return tuple(plan)

    def _send(self, observed: Sequence[Observed], state: State) -> None:
        """Call the host: once, below shard_map too, or once a device if arrays go."""
        # Statistics are of all shards; arrays are of one, and each device has its own.
        shard = _device() if ARRAYS in self.stats else {}
        arrays = [{k: x for k, x in one.raw.items() if k in statistics.ARRAYS} for one in observed]
        rest = [
            {k: x for k, x in one.raw.items() if k not in statistics.ARRAYS} for one in observed
        ]

        def send() -> jax.Array:
            words, layout = pack((rest, state, shard))
            receive = functools.partial(self._receive, [one[:2] for one in observed], layout)
            jax.debug.callback(receive, words, arrays)
            return jnp.zeros(())

        if shard or not (device := _device()):
            send()
            return
        first = functools.reduce(jnp.logical_and, [index == 0 for index in device.values()])
        lax.cond(first, send, lambda: jnp.zeros(()))

    def _receive(
        self,
        names: Sequence[tuple[Entry, Tag]],
        layout: PackedLayout,
        words: object,
        arrays: Sequence[dict[str, np.ndarray]],
    ) -> None:
        raws, state, shard = unpack(words, layout)
        step, index = int(state.step), tuple(map(int, state.indices))
        shard = {axis: int(number) for axis, number in shard.items()}
        with self._lock:
            for (entry, tag), raw, whole in zip(names, raws, arrays, strict=True):
                number, counted = step, (tag, index, *shard.values())
                if step == _UNKNOWN:
                    number = self._counts[counted]
                    self._counts[counted] += 1
                record = Record(
                    tag=tag,
                    step=number,
                    index=index,
                    shard=shard,
                    order=entry.order(index),
                    stats=statistics.numbers(raw, self.stats),
                    **{name: np.asarray(x) for name, x in whole.items()},
                )
                self._keep(record)

    def _keep(self, record: Record) -> None:
        """Add a record; called from the thread that runs callbacks, one at a time."""
        self._records.setdefault(record.tag, []).append(record)


def _as_step(step: IntScalar) -> IntScalar:
    shape, dtype = jnp.shape(step), jnp.result_type(step)
    if shape != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"capture: step must give an integer scalar, got step of dtype={dtype}, shape={shape}"
        )
    return step.astype(jnp.int32) if isinstance(step, Tracer) else step


def _refuse(x: jax.Array) -> None:
    raise ValueError(
        f"capture: a derivative of what is captured is taken, by an array of shape={x.shape}, and "
        "its casts would not be seen; capture the function that takes it: capture(jax.grad(loss))"
    )


def _functional(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Callable[[Any], Any]]:
    """A call without the objects of flax.nnx that it may change, and what changes them after it."""
    nodes = (args, kwargs)
    leaves = jax.tree.leaves(nodes, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    if not any(isinstance(x, nnx.Pytree) for x in leaves):
        return function, args, kwargs, lambda result: result
    graph, variables, rest = nnx.split(nodes, nnx.Variable, ...)

    def update(result: tuple[Any, Any]) -> Any:
        nnx.update(nodes, result[1])
        return result[0]

    return _of_state, (function, graph, variables, rest), {}, update


def _of_state(
    function: Callable[..., Any], graph: Any, variables: Any, rest: Any
) -> tuple[Any, Any]:
    """The result of a call, and the state of the objects of flax.nnx among its arguments."""
    args, kwargs = nodes = nnx.merge(graph, variables, rest)
    return function(*args, **kwargs), nnx.state(nodes, nnx.Variable)


def _device() -> dict[str, jax.Array]:
    """Which device this is, along each axis of shard_map."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return {axis: lax.axis_index(axis) for axis in axes}


def pack(content: object) -> tuple[jax.Array, PackedLayout]:
    """Arrays of 32 bits as one of words: each array costs a callback time."""
    leaves, tree = jax.tree.flatten(content)
    words = [jnp.ravel(lax.bitcast_convert_type(x, jnp.uint32)) for x in leaves]
    layout = tree, [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
    return jnp.concatenate(words), layout


def unpack(words: object, layout: PackedLayout) -> Any:
    """What was packed, as NumPy arrays."""
    tree, leaves = layout
    words, start, arrays = np.asarray(words), 0, []
    for shape, dtype in leaves:
        end = start + math.prod(shape)
        arrays.append(words[start:end].view(dtype).reshape(shape))
        start = end
    return jax.tree.unflatten(tree, arrays)


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
      mx_jax.inspect.capture.NonFiniteError: guard: a block must be finite to be quantized, ...
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


class Guarded(Captured[P, R]):
    """What `guard` returns: it keeps the first bad record, and raises once its step is over."""

    first: Record | None = None

    def _keep(self, record: Record) -> None:
        first = self.first
        if first is not None and record.step > first.step:
            raise NonFiniteError(first)
        is_bad = record.stats["nonfinite_blocks"] > 0
        if is_bad and (first is None or (record.step, record.order) < (first.step, first.order)):
            self.first = record

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = super().__call__(*args, **kwargs)
            jax.effects_barrier()
        except Exception as error:
            # JAX wraps what a callback raises in an error of its own.
            if (first := self._taken()) is not None:
                raise NonFiniteError(first) from error
            raise
        if (first := self._taken()) is not None:
            raise NonFiniteError(first)
        return result

    def _taken(self) -> Record | None:
        # A loop that catches the error may go on, from a checkpoint.
        first, self.first = self.first, None
        return first


def guard(
    function: Callable[P, R], *, step: Callable[P, IntScalar] | None = None
) -> "Guarded[P, R]":
    """A function that raises at the first block with Inf or NaN in it that is to be quantized.

    Forward products come before their gradients, and the call is over before it raises: so what is
    named is where it begins, not what is recorded first. Where calls are traced (the whole loop is
    compiled) the next step is stopped, of which JAX logs an error.

    Args:
      function: as `capture` takes it.
      step: as `capture` takes it.

    Raises:
      NonFiniteError: in the call, with the record, which has tag and step.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> x = jnp.ones((4, 64)).at[1, 40].set(jnp.inf)
      >>> layer = jax.named_scope("mlp")(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> _ = mx_jax.inspect.guard(layer)(x, jnp.ones((64, 8)))
      Traceback (most recent call last):
      mx_jax.inspect.capture.NonFiniteError: guard: a block must be finite to be quantized, got ...
    """
    return Guarded(function, None, frozenset({"nonfinite"}), 1, step)
