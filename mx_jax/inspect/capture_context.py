"""The context that watches products: what it computes in their program, and takes on the host."""

import collections
import contextlib
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.inspect import capture_statistics as statistics
from mx_jax.inspect.capture_message import Layout, pack, unpack
from mx_jax.inspect.capture_numbers import finished
from mx_jax.inspect.capture_record import Record, Scalar, program_order
from mx_jax.inspect.capture_statistics import Raw
from mx_jax.inspect.flax_scans import counted_scans
from mx_jax.inspect.modules import module_paths
from mx_jax.inspect.sinks import Sink
from mx_jax.mxarray import MXArray
from mx_jax.ops.tags import Moment, Tag, at_step, watching
from mx_jax.ops.watched import Look, Sight, Tap, values

Filter = Callable[[Tag], bool]
ARRAYS = "arrays"
_PATHS_IN_WARNING = 3


@functools.partial(jax.tree_util.register_dataclass, data_fields=("raws",), meta_fields=("tags",))
@dataclasses.dataclass(frozen=True)
class _Seen:
    """Statistics on their way from a forward product to where they are told."""

    raws: list[Raw]
    tags: tuple[Tag, ...]


class Capture:
    """What `capture` returns: a context, which may be entered again.

    Entered again, a program that was compiled for it is not compiled anew.

    Attributes:
      filter: which tags count.
      given: the filter as the caller gave it.
      stats: names of statistics.
      every: every how many steps.
      step: of training, or None.
      sinks: where records go.
      unmatched: what to warn of if the filter matched nothing: who warns, and what is missing.
    """

    unmatched = "capture", "there is no record"

    def __init__(
        self,
        *,
        filter: Filter,
        given: str | Filter | None,
        stats: frozenset[str],
        every: int,
        step: Any,
        sinks: Sequence[Sink],
    ):
        self.filter, self.given = filter, given
        self.stats, self.every, self.step = stats, every, step
        self.sinks = tuple(sinks)
        self.uses: dict[str, tuple[Any, int]] = {}
        self.calls: dict[str, dict[tuple[int, ...], int]] = {}
        self._told_step: int | None = None
        # Of everything that the filter was asked about: None until then.
        self._matched: bool | None = None
        self._refused: dict[str, None] = {}
        self._counts: collections.Counter[Any] = collections.Counter()
        self._lock = threading.Lock()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            stack.enter_context(watching((*watching.value, self)))
            stack.enter_context(module_paths())
            stack.enter_context(counted_scans())
            if self.step is not None:
                stack.enter_context(at_step(self.step))
            self._entered.append(stack.pop_all())
        return self.sinks[0] if len(self.sinks) == 1 else self.sinks

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
        if self._matched is False and error[0] is None:
            paths = ", ".join(repr(path) for path in list(self._refused)[:_PATHS_IN_WARNING])
            operation, missing = self.unmatched
            hint = "; a regular expression must match a whole path"
            warnings.warn(
                f"{operation}: the filter matched none of {len(self._refused)} paths, so "
                f"{missing}; got filter={self.given!r} and paths {paths}"
                f"{hint if isinstance(self.given, str) else ''}",
                stacklevel=2,
            )

    def _end(self) -> None:
        # What still runs tells it before the sinks are closed.
        jax.effects_barrier()
        self.uses.clear()
        for sink in self.sinks:
            sink.close()

    def looks_at(self, step: int) -> bool:
        """Whether a step counts."""
        return step % self.every == 0

    @contextlib.contextmanager
    def told(self, step: int) -> Iterator[None]:
        """A context of a step that counts and that no program has."""
        before, self._told_step = self._told_step, step
        try:
            yield
        finally:
            self._told_step = before

    def _compute(self, look: Look, tags: list[Tag]) -> list[Raw]:
        """Statistics of what is wanted, whose tags are put into a list."""
        tags.clear()
        raws: list[Raw] = []
        for tag, sight in look.sights(ARRAYS in self.stats):
            if self._wants(tag):
                tags.append(tag)
                raws.append(statistics.of_shards(self._raw(sight())))
        return raws

    def _wants(self, tag: Tag) -> bool:
        if tag.side is None and not self.stats & {"error", ARRAYS}:
            return False
        wanted = self.filter(tag)
        self._matched = bool(self._matched or wanted)
        if not wanted:
            self._refused[tag.path] = None
        return wanted

    def _raw(self, sight: Sight) -> Raw:
        raw: Raw = {}
        if isinstance(sight.after, MXArray):
            axis = sight.tag.axis
            assert axis is not None
            if sight.before is None:
                raw |= statistics.of_stored(sight.after, axis, self.stats)
            else:
                raw |= statistics.of_cast(sight.before, sight.after, axis, self.stats)
        else:
            assert sight.before is not None and sight.compared is not None
            raw |= statistics.of_product(sight.before, sight.compared, sight.after)
        if ARRAYS in self.stats:
            raw |= {"after": values(sight.after)}
            raw |= {} if sight.before is None else {"before": sight.before}
        return raw

    def look(self, look: Look, now: Moment) -> _Seen:
        """Statistics of a product, or zeros where its step does not count."""
        tags: list[Tag] = []
        compute = functools.partial(self._compute, look, tags)
        due = self._due(now)
        if due is None:
            return _Seen(compute(), tuple(tags))
        shapes = jax.eval_shape(compute)
        nothing = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return _Seen(lax.cond(due, compute, nothing), tuple(tags))

    def tell(self, seen: _Seen | None, looks: Sequence[Look], tap: Tap, now: Moment) -> None:
        """Hand statistics to the host, and those of more looks, if their step counts."""

        def told() -> jax.Array:
            raws, tags = ([], []) if seen is None else (list(seen.raws), list(seen.tags))
            for look in looks:
                own: list[Tag] = []
                raws += self._compute(look, own)
                tags += own
            return self._send(raws, tuple(tags), tap, now)

        self._if_due(now, told)

    def _due(self, now: Moment) -> jax.Array | None:
        """Whether a step counts; None if all do."""
        if self.every == 1 or now.told:
            return None
        if now.step is None:
            raise ValueError(
                f"capture: every={self.every} needs the step, which nothing told; write `with "
                "inspect.at_step(step):` around each step, or give step="
            )
        return now.step % self.every == 0

    def _if_due(self, now: Moment, run: Callable[[], jax.Array]) -> None:
        due = self._due(now)
        if due is None:
            run()
        else:
            lax.cond(due, run, lambda: jnp.zeros(()))

    def _send(self, raws: list[Raw], tags: tuple[Tag, ...], tap: Tap, now: Moment) -> jax.Array:
        """Call the host: once, below vmap and shard_map too, or once a device if arrays go."""
        if not tags:
            return jnp.zeros(())
        places = _places()
        # Statistics are of all shards; arrays are of one, and each device has its own.
        shard = places if ARRAYS in self.stats else {}

        @custom_vmap
        def send(raws: list[Raw], now: Moment, shard: dict[str, jax.Array]) -> jax.Array:
            content = [statistics.shortened(raw) for raw in raws], now, shard
            *message, layout = pack(content, statistics.ARRAYS)
            jax.debug.callback(functools.partial(self._receive, tags, tap, layout), *message)
            return jnp.zeros(())

        @send.def_vmap
        def _(lanes: int, batched: Any, raws: list[Raw], now: Moment, shard: Any) -> Any:
            theirs, own, _ = batched
            if any(jax.tree.leaves(own)):
                # Lanes with an index of their own are layers.
                for lane in range(lanes):
                    send(*_lane((raws, now, shard), batched, lane))
                return jnp.zeros(()), False
            joined = [
                statistics.of_lanes(raw, each, lanes)
                for raw, each in zip(raws, theirs, strict=True)
            ]
            return send(joined, now, shard), False

        if shard:
            return send(raws, now, shard)
        return _on_first(places, lambda: send(raws, now, shard))

    def _receive(
        self, tags: tuple[Tag, ...], tap: Tap, layout: Layout, words: Any, whole: Any
    ) -> None:
        """On the host."""
        raws, now, shard = unpack(words, whole, layout)
        shard = {axis: int(place) for axis, place in shard.items()}
        index = tuple(int(number) for number in now.index)
        with self._lock:
            for tag, raw in zip(tags, raws, strict=True):
                record = Record(
                    tag=tag,
                    step=self._step((tag, index, *shard.values()), now),
                    index=index,
                    shard=shard,
                    order=program_order(tag, tap, index),
                    before=raw.pop("before", None),
                    after=raw.pop("after", None),
                    stats=finished(raw, self.stats),
                )
                for sink in self.sinks:
                    sink.write(record)

    def _step(self, what: Any, now: Moment) -> int:
        step = self._told_step if now.told else now.step
        if step is not None:
            return int(step)
        self._counts[what] += 1
        return self._counts[what] - 1

    def send_scalar(self, name: str, value: jax.Array, now: Moment) -> None:
        """Hand a number to the host, if its step counts."""

        def receive(value: Any, now: Any) -> None:
            with self._lock:
                own = Scalar(name=name, step=self._step(name, now), value=float(value))
                for sink in self.sinks:
                    sink.write(own)

        def send() -> jax.Array:
            jax.debug.callback(receive, value, now)
            return jnp.zeros(())

        # One step has one number, which devices of shard_map agree on.
        self._if_due(now, lambda: _on_first(_places(), send))


def _places() -> dict[str, jax.Array]:
    """Which device this is, along each axis of shard_map."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return {axis: lax.axis_index(axis) for axis in axes}


def _on_first(places: dict[str, jax.Array], run: Callable[[], jax.Array]) -> jax.Array:
    """Run on the first device."""
    if not places:
        return run()
    first = functools.reduce(jnp.logical_and, [index == 0 for index in places.values()])
    return lax.cond(first, run, lambda: jnp.zeros(()))


def _lane(tree: Any, batched: Any, lane: int) -> Any:
    return jax.tree.map(lambda x, own: x[lane] if own else x, tree, tuple(batched))
