"""Casts and products as a program's equations have them, and how they are observed as it runs.

Each cast is an equation: what it reads is the tensor before, what it gives is the tensor after. The
names of its scopes say the rest. A product's error follows from the values behind its operands.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    JaxprEqn,
    Literal,
)

from mx_jax.axes import SIDES
from mx_jax.backends.calls import (
    MatmulCall,
    OperandType,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
)
from mx_jax.backends.reference import REFERENCE
from mx_jax.inspect import statistics
from mx_jax.inspect.records import Part, Tag, casts_of, is_again, product_of
from mx_jax.inspect.statistics import Raw
from mx_jax.jaxpr.read import Site, Where, definitions, used, walk
from mx_jax.jaxpr.regions import Values
from mx_jax.jaxpr.rewrite import Read, Rule
from mx_jax.mxarray import MXArray
from mx_jax.ops.dense import cast_by_hand
from mx_jax.ops.product import values
from mx_jax.packed import unpacked

ARRAYS = "arrays"
POSITIONS = 128
"""Of each operand: a product whose operands keep no more is compared as a whole."""
# The rule of operands that came quantized, as tags have it.
STORED = "stored"
HIGH = "high precision"
_PRODUCTS = {"mx_matmul"}
# What hands its operands on as they are.
_PASSING = {"name", "mx_no_derivative", "sharding_constraint", "optimization_barrier"}
_PASSING |= {"pvary", "pcast"}
_LOOPS = {"scan", "while"}
# Of each `vmap`, the innermost first, the mapped axis of each array.
Axes = Sequence[tuple[int | None, ...]]


# What there is to see in a program ----------------------------------------------------------------


class Look(NamedTuple):
    """One cast or product of an equation that is to be observed.

    Attributes:
      tag: its name.
      variables: what is looked at.
      axes: in which `vmap`s map these.
      observe: from names of statistics and the arrays of one lane to the statistics.
    """

    tag: Tag
    variables: tuple[Any, ...]
    axes: Axes
    observe: Callable[..., Raw]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """What is to be observed of one equation.

    Attributes:
      where: its place in the program.
      loops: for each loop around, how much of the place leads there, and -1 if it runs backwards.
      looks: in order.
    """

    where: Where
    loops: tuple[tuple[int, int], ...]
    looks: tuple[Look, ...]

    def order(self, index: Sequence[int]) -> tuple[int, ...]:
        """When it runs, in these iterations of its loops."""
        order, start = list[int](), 0
        for (depth, sign), number in zip(self.loops, index, strict=True):
            order += [*self.where[start:depth], sign * number]
            start = depth
        return (*order, *self.where[start:])


class _Cast(NamedTuple):
    """A cast of a program: its call, the variable that is cast, codes and scales, and the mapped
    axis of the former in each `vmap`."""

    call: QuantizeCall
    before: Any
    results: tuple[Any, ...]
    axes: tuple[int | None, ...]


class _Seen(NamedTuple):
    """A cast or a product (of no cast), and what it is of."""

    site: Site
    part: Part
    cast: _Cast | None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.part.path, self.part.product, self.part.side


def entries_of(program: ClosedJaxpr) -> list[Entry]:
    """What there is to observe in a program, each cast and product once, in order."""
    sites = walk(program)
    seen = list(_seen(sites, used(program, sites)))
    # What is computed again is not observed again.
    first = {own.key for own in seen if not is_again(own.site.scope)}
    seen = [own for own in seen if own.key not in first or not is_again(own.site.scope)]
    made, tags = definitions(sites), dict[Any, Tag]()
    looks: dict[Where, list[Look]] = collections.defaultdict(list)
    for own, call in zip(seen, _calls(seen), strict=True):
        if own.cast is None:
            looks[own.site.where] += _of_product(own, call, tags, made)
            continue
        tag = _tag(own.part, call, own.cast.call.format.name, own.cast.call.scale_rule.name)
        # Of a product it is found by its codes, or by its name.
        tags |= {own.cast.results[0]: tag, (*own.key, call): tag}
        axes = [(axis, *[0] * len(own.cast.results)) for axis in own.cast.axes]
        variables = (own.cast.before, *own.cast.results)
        observe = functools.partial(_observe_cast, own.cast.call, tag)
        looks[own.site.where].append(Look(tag, variables, axes, observe))
    return [
        Entry(site.where, _loops(site), tuple(looks[site.where]))
        for site in sites
        if site.where in looks
    ]


def _seen(sites: Sequence[Site], read: Collection[Any]) -> Iterator[_Seen]:
    for site in sites:
        part = product_of(site.scope) if site.eqn.primitive.name in _PRODUCTS else None
        if part is not None:
            yield _Seen(site, part, None)
        for cast, part in zip(_casts_in(site.eqn), casts_of(site.scope), strict=False):
            # One of a pair may be for a gradient that nobody wants.
            if any(own in read for own in cast.results):
                yield _Seen(site, part, cast)


def _casts_in(eqn: JaxprEqn) -> list[_Cast]:
    """The casts that an equation makes."""
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
    results = iter(eqn.outvars)
    sizes = [3 if len(eqn.outvars) == 3 or call.format.tensor_scale else 2 for call in calls]
    return [
        _Cast(call, before, tuple(itertools.islice(results, size)), axes)
        for call, size in zip(calls, sizes, strict=True)
    ]


def _tag(part: Part, call: int, format: str, rule: str, **others: Any) -> Tag:
    return Tag(**(part._asdict() | others), format=format, rule=rule, call=call)


def _loops(site: Site) -> tuple[tuple[int, int], ...]:
    return tuple(
        (2 * depth + 2, -1 if eqn.params.get("reverse") else 1)
        for depth, eqn in enumerate(site.around)
        if eqn.primitive.name in _LOOPS
    )


def _calls(seen: Sequence[_Seen]) -> list[int]:
    """Which use of its path each is: gradients come in the reverse order of what they are of."""
    counts = collections.Counter(own.key for own in seen)
    before: collections.Counter[Any] = collections.Counter()
    calls = []
    for own in seen:
        number = before[own.key]
        before[own.key] += 1
        if own.part.product != "output":
            outputs = counts[own.part.path, "output", None]
            number = max(outputs, counts[own.key]) - 1 - number
        calls.append(number)
    return calls


def _of_product(
    own: _Seen, call: int, tags: Mapping[Any, Tag], made: Mapping[Any, JaxprEqn]
) -> Iterator[Look]:
    """Looks at a product, and at its operands that came quantized."""
    eqn, part = own.site.eqn, own.part
    work = eqn.params["work"]
    # The number of each operand's codes among the leaves.
    numbers = [
        x.codes if isinstance(x, MXArray) else None
        for x in jax.tree.unflatten(work.tree, range(len(eqn.invars)))[:2]
    ]
    casts = [None if i is None else _cast_behind(eqn.invars[i], made) for i in numbers]
    behind = [
        None if i is None or cast is None else _mapped(cast, [axes[i] for _, axes in work.batches])
        for i, cast in zip(numbers, casts, strict=True)
    ]
    known = [own for own in behind if own is not None]
    variables = (*(own.before for own in known), eqn.outvars[0], *eqn.invars)
    axes = [
        (*(own.axes[i] for own in known), 0, *mapped) for i, (_, mapped) in enumerate(work.batches)
    ]
    parts = functools.partial(_parts, work.tree, [own is not None for own in behind])
    texts: list[tuple[str, str]] = []
    swapped = False
    for position, (type, cast) in enumerate(
        zip((work.call.lhs, work.call.rhs), casts, strict=True)
    ):
        side = SIDES[position]
        tag = tags.get((part.path, part.product, side, call))
        if cast is not None and (found := tags.get(cast.results[0])) is not None:
            tag, swapped = found, swapped or found.side != side
        if type.format is None:
            texts.append((HIGH, HIGH))
            continue
        if tag is None:
            rule = STORED if cast is None else cast.call.scale_rule.name
            stored = {"side": side, "axis": type.axes.block_axis}
            tag = _tag(part, call, type.format.name, rule, **stored)
            if part.product == "output":
                observe = functools.partial(_observe_operand, parts, position, tag)
                yield Look(tag, variables, axes, observe)
        texts.append((tag.format, tag.rule))
    # Of a gradient's product the left operand may be the right one of the recipe's.
    format, rule = map(" x ".join, zip(*(texts[::-1] if swapped else texts), strict=True))
    observe = functools.partial(_observe_product, parts, work.call)
    yield Look(_tag(part, call, format, rule), variables, axes, observe)


def _cast_behind(variable: Any, made: Mapping[Any, JaxprEqn]) -> _Cast | None:
    """The cast whose codes a variable holds, as they are."""
    while not isinstance(variable, Literal) and (eqn := made.get(variable)) is not None:
        for cast in _casts_in(eqn):
            if cast.results[0] is variable:
                return cast
        if eqn.primitive.name not in _PASSING:
            return None
        variable = eqn.invars[eqn.outvars.index(variable)]
    return None


def _mapped(cast: _Cast, codes: Sequence[int | None]) -> _Cast | None:
    """A cast in the `vmap`s of its product, which map its codes along these axes."""
    if sum(axis is not None for axis in codes) != len(cast.axes):
        return None
    own = iter(cast.axes)
    return cast._replace(axes=tuple(None if axis is None else next(own) for axis in codes))


# What is seen of it -------------------------------------------------------------------------------


def _observe_cast(
    call: QuantizeCall, tag: Tag, stats: Collection[str], before: jax.Array, *results: jax.Array
) -> Raw:
    codes, scales, *others = results
    options: Any = {"format": call.format, "blocks": call.blocks, "dtype": call.dtype}
    scale = others[0] if others else None
    after = MXArray(codes=codes, scales=scales, tensor_scale=scale, **options)
    return _compare(before, after, tag, stats)


def _compare(before: jax.Array | None, after: Any, tag: Tag, stats: Collection[str]) -> Raw:
    assert tag.axis is not None
    raw = statistics.of_cast(before, after, tag.axis, stats)
    if ARRAYS in stats:
        raw |= {"after": values(after)} | ({} if before is None else {"before": before})
    return raw


def _parts(tree: Any, are_known: Sequence[bool], arrays: Sequence[jax.Array]) -> Any:
    """Of a product: the values behind both operands, its result, and what it is called with."""
    left = iter(arrays)
    known = [next(left) if is_known else None for is_known in are_known]
    result = next(left)
    return known, result, jax.tree.unflatten(tree, list(left))


def _observe_operand(
    parts: Any, position: int, tag: Tag, stats: Collection[str], *arrays: jax.Array
) -> Raw:
    known, _, operands = parts(arrays)
    return _compare(known[position], unpacked(operands[position]), tag, stats)


def _observe_product(
    parts: Any, call: MatmulCall | RaggedCall, stats: Collection[str], *arrays: jax.Array
) -> Raw:
    """A product against that of the values behind its operands in float32."""
    known, actual, operands = parts(arrays)
    exact = [
        values(own) if before is None else before
        for before, own in zip(known, operands, strict=False)
    ]
    steps = [{}, {}, {}] if ARRAYS in stats else _sample(call, exact)
    lhs, rhs = (_every(x.astype(jnp.float32), own) for x, own in zip(exact, steps, strict=False))
    wide = dataclasses.replace(
        call,
        lhs=OperandType.of(lhs, call.lhs.axes),
        rhs=OperandType.of(rhs, call.rhs.axes),
        out_dtype=np.dtype(np.float32),
        precision=lax.Precision.HIGHEST,
    )
    before = REFERENCE.run(wide, lhs, rhs, *operands[2:])
    raw = statistics.of_product(before, _every(actual, steps[2]), actual)
    return raw | {"before": before, "after": actual} if ARRAYS in stats else raw


class State(NamedTuple):
    """What goes down to the bodies of loops.

    Attributes:
      step: of training, int32; -1 if it is not known.
      indices: of the iteration, for each loop around, outermost first.
    """

    step: jax.Array
    indices: tuple[jax.Array, ...] = ()


class Observed(NamedTuple):
    """Statistics of one cast or product, before they are sent to the host."""

    entry: Entry
    tag: Tag
    raw: Raw


@dataclasses.dataclass(frozen=True, eq=False)
class Observation(Rule):
    """The rule of a rewritten program: equations compute what they did, and are observed.

    Attributes:
      stats: names of statistics.
      send: is given what was observed in one body, and the body's state.
    """

    stats: frozenset[str]
    send: Callable[[Sequence[Observed], State], None]
    # Of each body that runs, the innermost last.
    _bodies: list[list[tuple[JaxprEqn, Observed]]] = dataclasses.field(default_factory=list)

    def iteration(self, state: State, index: jax.Array | None) -> State:
        assert index is not None
        return state._replace(indices=(*state.indices, index.astype(jnp.int32)))

    @contextlib.contextmanager
    def body(self, state: State) -> Iterator[None]:
        self._bodies.append([])
        try:
            yield
            # Together: each call of the host costs time.
            own = self._bodies[-1]
            for _, group in itertools.groupby(own, lambda pair: pair[0].ctx.cur_abstract_mesh):
                found = list(group)
                with found[0][0].ctx.manager:
                    self.send([observed for _, observed in found], state)
        finally:
            self._bodies.pop()

    def compute(self, eqn: JaxprEqn, read: Read, entry: Entry, state: State) -> Values:
        results = list(eqn.primitive.bind(*map(read, eqn.invars), **eqn.params))
        known = dict(zip(eqn.outvars, results, strict=True))

        def read_all(atom: Any) -> Any:
            return read(atom) if isinstance(atom, Literal) or atom not in known else known[atom]

        for tag, variables, batches, observe in entry.looks:
            if tag.side is None and not self.stats & {"error", ARRAYS}:
                continue
            of_lane: Any = functools.partial(observe, self.stats)
            for axes in batches:
                of_lane = _joined(jax.vmap(of_lane, axes))
            raw = of_lane(*map(read_all, variables))
            observed = Observed(entry, tag, statistics.of_shards(raw))
            self._bodies[-1].append((eqn, observed))
        return results


def _joined(lanes: Callable[..., Raw]) -> Callable[..., Raw]:
    return lambda *arrays: statistics.of_lanes(lanes(*arrays))


# What of a product is compared --------------------------------------------------------------------


def _sample(call: MatmulCall | RaggedCall, operands: Sequence[jax.Array]) -> list[dict[int, int]]:
    """Distances between compared positions along axes of both operands, and of their product."""
    steps: list[dict[int, int]] = [{}, {}, {}]
    left, right = call.lhs.axes.kept, call.rhs.axes.kept
    if isinstance(call, MatmulCall):
        first = call.num_batch
    elif call.contracts_rows:
        first = 1
    else:
        # Groups part the rows.
        left, first = (), 1
    for number, axes in enumerate((left, right)):
        distances = strides([operands[number].shape[axis] for axis in axes])
        for place, (axis, step) in enumerate(zip(axes, distances, strict=True), start=first):
            steps[number][axis] = steps[2][place] = step
        first += len(axes)
    return steps


def strides(sizes: Sequence[int]) -> list[int]:
    """Odd distances along axes of these sizes that leave at most `POSITIONS` of them together."""
    found = [1] * len(sizes)

    def count(axis: int) -> int:
        return -(-sizes[axis] // found[axis])

    axes = range(len(sizes))
    while math.prod(map(count, axes)) > POSITIONS:
        longest = max(axes, key=count)
        others = math.prod(count(axis) for axis in axes if axis != longest)
        least = -(-sizes[longest] // max(POSITIONS // others, count(longest) // 2))
        found[longest] = max(found[longest] + 2, least | 1)
    return found


def _every(x: jax.Array, steps: dict[int, int]) -> jax.Array:
    """Positions of an array at these distances along its axes; all where none is over 1."""
    if max(steps.values(), default=1) == 1:
        return x
    own = [steps.get(axis, 1) for axis in range(x.ndim)]
    return lax.slice(x, [0] * x.ndim, x.shape, own)
