"""Casts as a program's equations have them, and how they are observed as it runs.

Each cast is an equation: what it reads is the tensor before, what it gives is the tensor after. The
names of its scopes say the rest.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    JaxprEqn,
)

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.inspect import statistics
from mx_jax.inspect.records import Part, Tag, casts_of, is_again
from mx_jax.inspect.statistics import Raw
from mx_jax.jaxpr.read import Site, Where, name_of, used, walk
from mx_jax.jaxpr.regions import Values
from mx_jax.jaxpr.rewrite import Read, Rule
from mx_jax.mxarray import MXArray
from mx_jax.ops.product import cast_by_hand, values

ARRAYS = "arrays"
_LOOPS = {"scan", "while"}


class Cast(NamedTuple):
    """A cast of a program.

    Attributes:
      call: which.
      before: the variable that is cast.
      results: its codes and scales.
      axes: of each `vmap`, the innermost first, the mapped axis of `before`.
    """

    call: QuantizeCall
    before: Any
    results: tuple[Any, ...]
    axes: tuple[int | None, ...]

    def observe(self, stats: Collection[str], axis: int, x: jax.Array, *results: jax.Array) -> Raw:
        """Statistics of one lane, from its arrays."""
        codes, scales, *others = results
        after = MXArray(
            codes=codes,
            scales=scales,
            tensor_scale=others[0] if others else None,
            format=self.call.format,
            blocks=self.call.blocks,
            dtype=self.call.dtype,
        )
        raw = statistics.of_cast(x, after, axis, stats)
        return raw | {"before": x, "after": values(after)} if ARRAYS in stats else raw


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What is to be observed of one equation.

    Attributes:
      where: its place in the program.
      loops: for each loop around, how much of the place leads there, and -1 if it runs backwards.
      casts: with their tags, in order.
    """

    where: Where
    loops: tuple[tuple[int, int], ...]
    casts: tuple[tuple[Tag, Cast], ...]

    def order(self, index: Sequence[int]) -> tuple[int, ...]:
        """When it runs, in these iterations of its loops."""
        order, start = list[int](), 0
        for (depth, sign), number in zip(self.loops, index, strict=True):
            order += [*self.where[start:depth], sign * number]
            start = depth
        return (*order, *self.where[start:])


def entries_of(program: ClosedJaxpr) -> list[Entry]:
    """The casts of a program, each once, in order."""
    sites = walk(program)
    read = used(program, sites)
    casts = [
        (site, part, cast)
        for site in sites
        for cast, part in zip(_casts_in(site.eqn), casts_of(site.scope), strict=False)
        # One of a pair may be for a gradient that nobody wants.
        if any(result in read for result in cast.results)
    ]
    # What is computed again is not observed again.
    first = {_use(part) for site, part, _ in casts if not is_again(site.scope)}
    casts = [x for x in casts if _use(x[1]) not in first or not is_again(x[0].scope)]
    tagged: dict[Where, list[tuple[Tag, Cast]]] = collections.defaultdict(list)
    for (site, part, cast), call in zip(casts, _calls([x[1] for x in casts]), strict=True):
        path, product, side, axis = part
        tag = Tag(
            path=path,
            product=product,
            side=side,
            axis=axis,
            format=cast.call.format.name,
            rule=cast.call.scale_rule.name,
            call=call,
        )
        tagged[site.where].append((tag, cast))
    return [
        Entry(site.where, _loops(site), tuple(tagged[site.where]))
        for site in sites
        if site.where in tagged
    ]


def _casts_in(eqn: JaxprEqn) -> list[Cast]:
    """The casts that an equation makes; none of an array without elements: it has no statistics."""
    if eqn.primitive.name == "mx_quantize":
        work, before = eqn.params["work"], eqn.invars[0]
        is_pair = isinstance(work.call, QuantizeBothCall)
        calls = [work.call.first, work.call.second] if is_pair else [work.call]
        axes = tuple(axes[0] for _, axes in work.batches)
    elif eqn.primitive.name == "mx_derivative" and eqn.params["of"].function is cast_by_hand:
        of = eqn.params["of"]
        calls, before = [of.static[0]], eqn.invars[of.number]
        axes = tuple(axes[0] for axes in of.batches)
    else:
        return []
    aval: Any = before.aval
    if not aval.size:
        return []
    results = iter(eqn.outvars)
    sizes = [3 if len(eqn.outvars) == 3 or call.format.tensor_scale else 2 for call in calls]
    return [
        Cast(call, before, tuple(itertools.islice(results, size)), axes)
        for call, size in zip(calls, sizes, strict=True)
    ]


def _loops(site: Site) -> tuple[tuple[int, int], ...]:
    return tuple(
        (2 * depth + 2, -1 if eqn.params.get("reverse") else 1)
        for depth, eqn in enumerate(site.around)
        if eqn.primitive.name in _LOOPS
    )


def _use(part: Part) -> tuple[Any, ...]:
    return part.path, part.product, part.side


def _calls(parts: Sequence[Part]) -> list[int]:
    """Which use of its path each is: gradients come in the reverse order of what they are of."""
    counts = collections.Counter(map(_use, parts))
    before: collections.Counter[Any] = collections.Counter()
    calls = []
    for part in parts:
        number = before[_use(part)]
        before[_use(part)] += 1
        if part.product != "output":
            outputs = (counts[part.path, "output", side] for side in ("lhs", "rhs"))
            number = max(*outputs, counts[_use(part)]) - 1 - number
        calls.append(number)
    return calls


# What is seen of it -------------------------------------------------------------------------------


class State(NamedTuple):
    """What goes down to the bodies of loops.

    Attributes:
      step: of training, int32; -1 if it is not known.
      indices: of the iteration, for each loop around, outermost first.
    """

    step: jax.Array
    indices: tuple[jax.Array, ...] = ()


class Observed(NamedTuple):
    """Statistics of one cast, before they are sent to the host."""

    entry: Entry
    tag: Tag
    raw: Raw


@dataclasses.dataclass(frozen=True, eq=False)
class Observation(Rule):
    """The rule of a rewritten program: equations compute what they did, and are observed.

    Attributes:
      stats: names of statistics.
      send: takes the statistics of one body to the host, with the body's state.
    """

    stats: frozenset[str]
    send: Callable[[Sequence[Observed], State], None]
    # Of each body that runs, the innermost last.
    _bodies: list[list[tuple[JaxprEqn, Observed]]] = dataclasses.field(default_factory=list)

    def iteration(self, state: State, index: jax.Array | None) -> State:
        assert index is not None
        return state._replace(indices=(*state.indices, index.astype(jnp.int32)))

    def context(self, eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
        # A captured step has the step's names, in profiles and for another capture.
        name = name_of(eqn)
        return jax.named_scope(name) if name else contextlib.nullcontext()

    @contextlib.contextmanager
    def body(self, state: State) -> Iterator[None]:
        self._bodies.append([])
        try:
            yield
            # Together: each call of the host costs time.
            observed = self._bodies[-1]
            for _, group in itertools.groupby(observed, lambda x: x[0].ctx.cur_abstract_mesh):
                together = list(group)
                with together[0][0].ctx.manager:
                    self.send([one for _, one in together], state)
        finally:
            self._bodies.pop()

    def compute(self, eqn: JaxprEqn, read: Read, entry: Entry, state: State) -> Values:
        results = list(eqn.primitive.bind(*map(read, eqn.invars), **eqn.params))
        computed = dict(zip(eqn.outvars, results, strict=True))
        for tag, cast in entry.casts:
            of_lane: Any = functools.partial(cast.observe, self.stats, tag.axis)
            for axis in cast.axes:
                of_lane = _joined(jax.vmap(of_lane, (axis, *[0] * len(cast.results))))
            after = (computed[variable] for variable in cast.results)
            raw = of_lane(read(cast.before), *after)
            self._bodies[-1].append((eqn, Observed(entry, tag, statistics.of_shards(raw))))
        return results


def _joined(lanes: Callable[..., Raw]) -> Callable[..., Raw]:
    return lambda *arrays: statistics.of_lanes(lanes(*arrays))
