"""Tensors before and after quantization, or statistics of them, from programs as they run."""

import collections
import contextlib
import functools
import itertools
import math
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import axes_scan
from flax.linen.module import InterceptorContext
from flax.nnx.transforms import iteration as nnx_iteration
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.inspect import statistics
from mx_jax.inspect.records import Memory, Record, Scalar, Sink
from mx_jax.inspect.statistics import STATISTICS, Raw
from mx_jax.mxarray import MXArray
from mx_jax.ops import tags
from mx_jax.ops.tags import Tag
from mx_jax.ops.watched import CallSite, ObservedProduct, values

# Of a pytree packed as words: its tree, and the shape and dtype of each leaf.
PackedLayout = tuple[Any, Sequence[tuple[tuple[int, ...], np.dtype]]]

Filter = Callable[[Tag], bool]
# Of one product: what its operands and itself are called, and their statistics, before they are
# sent to the host.
Observed = list[tuple[Tag, Raw]]
_ARRAYS = "arrays"
_PATHS_IN_WARNING = 3


def capture(
    filter: str | Filter | None = None,
    *,
    stats: str | Collection[str] = STATISTICS,
    every: int = 1,
    sink: Sink | Sequence[Sink] | None = None,
) -> "Capture":
    """A context that records what quantization does to the operands of products.

    Each operand that is quantized gives one record, forward and backward, and so does each product:
    under `jit`, `grad`, `vmap` (lanes are one operand), `scan`, `jax.checkpoint` (what is computed
    again is not recorded again), `shard_map` and with sharded inputs. Products are named by Flax's
    modules or by `tag`. A function that `jit` compiled before is compiled again. While no capture
    is entered, nothing of this is in a program.

    Statistics are computed where the arrays are; `STATISTICS` says what there are.

    Of an operand that came quantized, such as a stored weight, the rule is `"stored"`. It has no
    `underflow`, `saturation`, `sqnr` and `before`: what it was is not known. The error of its
    product is that of the other operand's cast.

    Args:
      filter: a regular expression for whole paths, or a function of a `Tag`; None: all. One that
        matched nothing is warned of in the end.
      stats: names of statistics, or one.
      every: every how many steps; more than 1 needs the step, which `at_step` gives. Without it
        every call counts.
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
    known = (*(row.name for row in statistics.TABLE), _ARRAYS)
    if unknown := names - {*known}:
        raise ValueError(
            f"capture: stats must be some of {', '.join(known)}, got stats={sorted(unknown)}"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"capture: every must be an integer of at least 1, got every={every!r}")
    sinks = (Memory(),) if sink is None else sink if isinstance(sink, Sequence) else (sink,)
    if not sinks or not all(hasattr(own, "write") and hasattr(own, "close") for own in sinks):
        raise TypeError(
            "capture: sink must be a sink or several, each with write(record) and close(), got "
            f"sink={sink!r}; for a file write sink=inspect.Jsonl(path)"
        )
    return Capture(filter, names, every, sinks)


def scalar(name: str, value: jax.typing.ArrayLike) -> None:
    """Record a number of a step, such as the loss, in the captures in context.

    Args:
      name: what it is.
      value: a scalar, traced or not. No gradient passes. Below `shard_map` the first device gives
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
    for watcher in tags.watching.value:
        watcher.send_scalar(name, lax.stop_gradient(jnp.asarray(value)), tags.counters())


class Capture:
    """What `capture` returns: a context; entered again, it compiles no program anew."""

    def __init__(
        self, filter: str | Filter | None, stats: frozenset[str], every: int, sinks: Sequence[Sink]
    ):
        self.pattern = filter
        self.filter: Filter = lambda tag: True
        if isinstance(filter, str):
            try:
                pattern = re.compile(filter)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    "capture: filter must be a regular expression for whole paths, got "
                    f"filter={filter!r}: {error}; re.escape makes one of a path"
                ) from error
            self.filter = lambda tag: pattern.fullmatch(tag.path) is not None
        elif filter is not None:
            if not callable(filter):
                raise TypeError(
                    "capture: filter must be a regular expression for paths, a function of a "
                    f"Tag or None, got filter={filter!r}"
                )
            self.filter = filter
        self.stats, self.every, self.sinks = stats, every, tuple(sinks)
        # Of each path that was entered from none, the trace that did last, and how often.
        self.uses: dict[str, tuple[Any, int]] = {}
        # The uses of each path, numbered.
        self.calls: dict[str, dict[tuple[int, ...], int]] = {}
        # What `at_step` says around the program.
        self._host_step: int | None = None
        # Of everything that the filter was asked about: None until then.
        self._matched: bool | None = None
        self._refused: dict[str, None] = {}
        self._counts: collections.Counter[Any] = collections.Counter()
        self._lock = threading.Lock()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            # In reverse: callbacks that still run come before the sinks are closed.
            for sink in reversed(self.sinks):
                stack.callback(sink.close)
            stack.callback(self.uses.clear)
            stack.callback(jax.effects_barrier)
            stack.enter_context(tags.watching((*tags.watching.value, self)))
            stack.enter_context(_named_layers())
            self._entered.append(stack.pop_all())
        return self.sinks[0] if len(self.sinks) == 1 else self.sinks

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)
        if self._matched is False and error is None:
            paths = ", ".join(repr(path) for path in list(self._refused)[:_PATHS_IN_WARNING])
            hint = "; a regular expression must match a whole path"
            warnings.warn(
                f"capture: the filter matched none of {len(self._refused)} paths, so "
                f"there is no record; got filter={self.pattern!r} and paths {paths}"
                f"{hint if isinstance(self.pattern, str) else ''}",
                stacklevel=2,
            )

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    @contextlib.contextmanager
    def at_host_step(self, step: int) -> Iterator[None]:
        """A context of a step that counts and is known on the host."""
        before, self._host_step = self._host_step, step
        try:
            yield
        finally:
            self._host_step = before
        for sink in self.sinks:
            if isinstance(sink, _FirstNonFinite):
                sink.check()

    def observe(self, product: ObservedProduct, now: tags.Counters) -> Observed:
        """Statistics of a product, or zeros where its step does not count."""
        return self._if_due(now, lambda: self._compute(product))

    def record(
        self,
        forward: Observed | None,
        products: Sequence[ObservedProduct],
        site: CallSite,
        now: tags.Counters,
    ) -> None:
        """Send statistics to the host, and those of more products, if their step counts."""

        def send() -> jax.Array:
            found = itertools.chain(forward or (), *map(self._compute, products))
            return self._send([*found], site, now)

        self._if_due(now, send)

    def send_scalar(self, name: str, value: jax.Array, now: tags.Counters) -> None:
        """Send a number to the host, if its step counts."""

        def receive(value: np.ndarray, now: tags.Counters) -> None:
            with self._lock:
                number = Scalar(name=name, step=self._step(name, now), value=float(value))
                for sink in self.sinks:
                    sink.write(number)

        def send() -> jax.Array:
            jax.debug.callback(receive, value, now)
            return jnp.zeros(())

        # One step has one number, which devices of shard_map agree on.
        self._if_due(now, lambda: _on_first(send))

    def _if_due(self, now: tags.Counters, run: Callable[[], Any]) -> Any:
        """What a function returns, or zeros where the step does not count."""
        if self.every == 1 or now.on_host:
            return run()
        if now.step is None:
            raise ValueError(
                f"capture: every={self.every} needs the step, and none is known; write `with "
                "inspect.at_step(step):` around each step"
            )
        # Zeros like avals differ along the same axes of shard_map as what they stand for.
        avals = jax.eval_shape(run)
        zeros = functools.partial(jax.tree.map, jnp.zeros_like, avals)
        return lax.cond(now.step % self.every == 0, run, zeros)

    def _compute(self, product: ObservedProduct) -> Observed:
        arrays, found = _ARRAYS in self.stats, []
        for tag, observe in product.observations(arrays):
            if tag.side is None and not self.stats & {"error", _ARRAYS}:
                continue
            wanted = self.filter(tag)
            self._matched = bool(self._matched or wanted)
            if not wanted:
                self._refused[tag.path] = None
                continue
            before, after, compared = observe()
            if isinstance(after, MXArray):
                assert tag.axis is not None
                raw = statistics.of_cast(before, after, tag.axis, self.stats)
            else:
                assert before is not None and compared is not None
                raw = statistics.of_product(before, compared, after)
            if arrays:
                raw |= {"after": values(after)} | ({} if before is None else {"before": before})
            found.append((tag, statistics.of_shards(raw)))
        return found

    def _send(self, found: Observed, site: CallSite, now: tags.Counters) -> jax.Array:
        """Call the host: once, below vmap and shard_map too, or once a device if arrays go."""
        if not found:
            return jnp.zeros(())
        # Statistics are of all shards; arrays are of one, and each device has its own.
        shard = _device() if _ARRAYS in self.stats else {}

        @custom_vmap
        def send(found: Observed, now: tags.Counters, shard: dict[str, jax.Array]) -> jax.Array:
            arrays = [{k: x for k, x in raw.items() if k in statistics.ARRAYS} for _, raw in found]
            rest = [
                (tag, {k: x for k, x in raw.items() if k not in statistics.ARRAYS})
                for tag, raw in found
            ]
            words, layout = pack((rest, now, shard))
            jax.debug.callback(functools.partial(self._receive, site, layout), words, arrays)
            return jnp.zeros(())

        @send.def_vmap
        def _(
            lanes: int, batched: Sequence[Any], found: Observed, now: tags.Counters, shard: object
        ) -> Any:
            theirs, own, _ = batched
            if any(jax.tree.leaves(own)):
                # Lanes with an index of their own are layers.
                for lane in range(lanes):
                    of_lane = lambda x, own, lane=lane: x[lane] if own else x  # noqa: E731
                    send(*jax.tree.map(of_lane, (found, now, shard), tuple(batched)))
                return jnp.zeros(()), False
            joined = [
                (tag, statistics.of_lanes(raw, each, lanes))
                for (tag, raw), (_, each) in zip(found, theirs, strict=True)
            ]
            return send(joined, now, shard), False

        if shard:
            return send(found, now, shard)
        return _on_first(lambda: send(found, now, shard))

    def _receive(
        self,
        site: CallSite,
        layout: PackedLayout,
        words: object,
        arrays: Sequence[dict[str, np.ndarray]],
    ) -> None:
        found, now, shard = unpack(words, layout)
        index, shard = jax.tree.map(int, (now.index, shard))
        *loops, own = site.order
        path = [number for pair in zip(loops, index, strict=False) for number in pair]
        with self._lock:
            for (tag, raw), whole in zip(found, arrays, strict=True):
                # Loops by their index, and gradients backwards, after all outputs.
                is_forward = tag.product == "output"
                order = (0, *path, own) if is_forward else (1, *(-x for x in (*path, own)))
                record = Record(
                    tag=tag,
                    step=self._step((tag, index, *shard.values()), now),
                    index=index,
                    shard=shard,
                    order=order,
                    stats=statistics.numbers(raw, self.stats),
                    **{name: np.asarray(x) for name, x in whole.items()},
                )
                for sink in self.sinks:
                    sink.write(record)

    def _step(self, counted: object, now: tags.Counters) -> int:
        """The step that is known, or how many records of this kind came before."""
        step = self._host_step if now.on_host else now.step
        if step is not None:
            return int(step)
        self._counts[counted] += 1
        return self._counts[counted] - 1


def _device() -> dict[str, jax.Array]:
    """Which device this is, along each axis of shard_map."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return {axis: lax.axis_index(axis) for axis in axes}


def _on_first(run: Callable[[], jax.Array]) -> jax.Array:
    if not (device := _device()):
        return run()
    first = functools.reduce(jnp.logical_and, [index == 0 for index in device.values()])
    return lax.cond(first, run, lambda: jnp.zeros(()))


def pack(content: object) -> tuple[jax.Array, PackedLayout]:
    """Arrays of 32 bits as one of words: each array costs a callback time."""
    leaves, tree = jax.tree.flatten(content)
    words = [jnp.ravel(lax.bitcast_convert_type(x, jnp.uint32)) for x in leaves]
    layout = tree, [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
    return jnp.concatenate(words), layout


def unpack(words: object, layout: PackedLayout) -> Any:
    """What was packed, as NumPy arrays."""
    tree, leaves = layout
    words, start, found = np.asarray(words), 0, []
    for shape, dtype in leaves:
        end = start + math.prod(shape)
        found.append(words[start:end].view(dtype).reshape(shape))
        start = end
    return jax.tree.unflatten(tree, found)


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


class _FirstNonFinite:
    """A sink that keeps the first bad record, and stops the program once its step is over."""

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

    def check(self, cause: BaseException | None = None) -> None:
        if self.first is not None:
            raise NonFiniteError(self.first) from cause


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """A context that raises at the first block with Inf or NaN in it that is to be quantized.

    Forward products come before their gradients, and the step is over before it raises: so what is
    named is where it begins, not what is recorded first. With `at_step` around the compiled
    function that is the end of the bad step. Otherwise the next step is stopped, of which JAX logs
    an error; or the context raises at its end. Without `at_step` calls are counted.

    Raises:
      NonFiniteError: with the record, which has tag and step.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> x = jnp.ones((4, 64)).at[1, 40].set(jnp.inf)
      >>> with mx_jax.inspect.guard(), mx_jax.inspect.tag("mlp"):
      ...     _ = mx_jax.matmul(x, jnp.ones((64, 8)), recipe="mxfp8")
      Traceback (most recent call last):
      mx_jax.inspect.capture.NonFiniteError: guard: a block must be finite to be quantized, got ...
    """
    sink = _FirstNonFinite()
    try:
        with capture(stats="nonfinite", sink=sink):
            yield
    except NonFiniteError:
        raise
    except Exception as error:
        # JAX wraps what a callback raises in an error of its own.
        sink.check(error)
        raise
    sink.check()


# Layers of Flax ---------------------------------------------------------------------------------
#
# `nn.scan` and `nnx.scan` have no place for a counter, and linen's traces its body once more before
# it scans: callbacks in there would run twice, and newer versions of Flax refuse them. So Flax's
# modules get a `jax.lax.scan` that gives its body the index while a capture runs, and a first trace
# in which none does. `inspect.tag(index=)` cannot stand in for the latter.


def _named(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: InterceptorContext,
) -> Any:
    if not tags.watching.value or context.module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    with tags.within(context.module.path):
        return call(*args, **kwargs)


class _Instead:
    """A module with other values for some of its names."""

    def __init__(self, module: object, **values: object):
        self._module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _scan(
    f: Callable[..., Any], init: Any, xs: Any = None, length: int | None = None, **options: Any
) -> Any:
    """`jax.lax.scan`, whose body knows its index."""
    if not tags.watching.value:
        return lax.scan(f, init, xs, length, **options)
    count = jax.tree.leaves(xs)[0].shape[0] if length is None else length

    def body(carry: Any, indexed: tuple[Any, jax.Array]) -> Any:
        own, index = indexed
        with tags.iteration(index):
            return f(carry, own)

    return lax.scan(body, init, (xs, jnp.arange(count)), length, **options)


def _uncaptured(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in which no capture runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with tags.watching(()):
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
def _named_layers() -> Iterator[None]:
    """A context in which each linen module names what runs in it, as nnx's layers do by themselves,
    and Flax's scans count their layers; contexts may overlap."""
    global _count
    with _lock:
        _count += 1
        if _count == 1:
            for module, name, value in _PLACES:
                _patches.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
    try:
        with nn.intercept_methods(_named):
            yield
    finally:
        with _lock:
            _count -= 1
            if not _count:
                _patches.close()
