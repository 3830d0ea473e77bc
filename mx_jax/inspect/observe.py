"""Casts and products as a program's equations have them, and how they are observed as it runs.

Each cast is an equation: what it reads is the tensor before, what it gives is the tensor after. The
names of its scopes say the rest. A product's error follows from the values behind its operands.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
from mx_jax.inspect.records import Tag
from mx_jax.inspect.scopes import Part, casts_of, is_again, product_of
from mx_jax.inspect.statistics import Raw
from mx_jax.jaxpr.read import Site, Where, definitions, used, walk
from mx_jax.jaxpr.regions import Values
from mx_jax.jaxpr.rewrite import Plan, Read
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
_PRODUCTS = {"mx_matmul", "mx_ragged"}
# What hands its operands on as they are.
_PASSING = {
    "name",
    "mx_no_derivative",
    "sharding_constraint",
    "optimization_barrier",
    "pvary",
    "pcast",
}
_LOOPS = {"scan", "while"}


# What a program casts and multiplies --------------------------------------------------------------


class Cast(NamedTuple):
    """A cast of a program.

    Attributes:
      call: format, rule and blocks.
      before: the variable that is cast.
      results: codes, scales and a tensor scale if there is one.
      axes: of each `vmap`, the innermost first, the mapped axis of what is cast.
    """

    call: QuantizeCall
    before: Any
    results: tuple[Any, ...]
    axes: tuple[int | None, ...]

    def array(self, results: Sequence[jax.Array]) -> MXArray:
        """The results, of one lane."""
        codes, scales, *others = results
        call = self.call
        options: Any = {"format": call.format, "blocks": call.blocks, "dtype": call.dtype}
        scale = others[0] if others else None
        return MXArray(codes=codes, scales=scales, tensor_scale=scale, **options)


def casts_in(eqn: JaxprEqn) -> list[Cast]:
    """The casts that an equation makes."""
    if eqn.primitive.name in ("mx_quantize", "mx_quantize_both"):
        work = eqn.params["work"]
        calls, before = [work.call], eqn.invars[0]
        if isinstance(work.call, QuantizeBothCall):
            calls = [work.call.first, work.call.second]
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
        Cast(call, before, tuple(itertools.islice(results, size)), axes)
        for call, size in zip(calls, sizes, strict=True)
    ]


class Operand(NamedTuple):
    """The values behind an operand of a product: a variable, and its mapped axis in each `vmap`."""

    variable: Any
    axes: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What is to be observed of an equation.

    Attributes:
      where: its place in the program.
      loops: for each loop around, how much of the place leads there, and -1 if it runs backwards.
      casts: names of the casts that it makes, None for one that is not to be observed.
      product: name of the product that it is, or None.
      operands: of a product, what is behind its codes; None if it has none, or nothing is known.
      stored: of a product, names of its operands that came quantized.
    """

    where: Where
    loops: tuple[tuple[int, int], ...] = ()
    casts: tuple[Tag | None, ...] = ()
    product: Tag | None = None
    operands: tuple[Operand | None, ...] = (None, None)
    stored: tuple[Tag | None, ...] = (None, None)

    @property
    def tags(self) -> list[Tag]:
        """All names."""
        return [own for own in (*self.casts, *self.stored, self.product) if own is not None]

    def kept(self, wanted: Callable[[Tag], bool]) -> "Entry":
        """What is wanted of it."""

        def chosen(tags: Sequence[Tag | None]) -> tuple[Tag | None, ...]:
            return tuple(own if own is not None and wanted(own) else None for own in tags)

        (product,) = chosen((self.product,))
        return dataclasses.replace(
            self, casts=chosen(self.casts), stored=chosen(self.stored), product=product
        )

    def order(self, index: Sequence[int]) -> tuple[int, ...]:
        """When it runs, in these iterations of its loops."""
        order, start = list[int](), 0
        for (depth, sign), number in zip(self.loops, index, strict=True):
            order += [*self.where[start:depth], sign * number]
            start = depth
        return (*order, *self.where[start:])


class _Seen(NamedTuple):
    """A cast (by its number in its equation) or a product (None) of a site."""

    site: Site
    part: Part
    number: int | None

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
    calls, made = _calls(seen), definitions(sites)
    # Names of casts, by what they are of.
    tags: dict[tuple[Any, ...], Tag] = {}
    entries: dict[Where, Entry] = {}
    for own, call in zip(seen, calls, strict=True):
        if own.number is not None:
            cast, part = casts_in(own.site.eqn)[own.number], own.part
            names = {"format": cast.call.format.name, "rule": cast.call.scale_rule.name}
            tag = Tag(**part._asdict(), **names, call=call)
            tags[*own.key, call] = tag
            entry = entries.setdefault(own.site.where, _entry(own.site, casts=(None, None)))
            casts = (*entry.casts[: own.number], tag, *entry.casts[own.number + 1 :])
            entries[own.site.where] = dataclasses.replace(entry, casts=casts)
    for own, call in zip(seen, calls, strict=True):
        if own.number is None:
            entries[own.site.where] = _product(own, call, tags, made)
    return sorted(entries.values(), key=lambda entry: entry.where)


def _seen(sites: Sequence[Site], read: set[Any]) -> Iterator[_Seen]:
    for site in sites:
        if site.eqn.primitive.name in _PRODUCTS:
            if (part := product_of(site.scope)) is not None:
                yield _Seen(site, part, None)
            continue
        casts = casts_in(site.eqn)
        for number, (cast, part) in enumerate(zip(casts, casts_of(site.scope), strict=False)):
            # One of a pair may be for a gradient that nobody wants.
            if not read.isdisjoint(cast.results):
                yield _Seen(site, part, number)


def _entry(site: Site, **options: Any) -> Entry:
    loops = tuple(
        (2 * depth + 2, -1 if eqn.params.get("reverse") else 1)
        for depth, eqn in enumerate(site.around)
        if eqn.primitive.name in _LOOPS
    )
    return Entry(where=site.where, loops=loops, **options)


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


def _product(own: _Seen, call: int, tags: Any, made: dict[Any, JaxprEqn]) -> Entry:
    """The entry of a product, whose operands' names are known."""
    eqn, part = own.site.eqn, own.part
    work = eqn.params["work"]
    # Numbers in the place of variables.
    numbers = jax.tree.unflatten(work.tree, range(len(eqn.invars)))[:2]
    types: tuple[OperandType, ...] = (work.call.lhs, work.call.rhs)
    operands, stored, texts = [], [], {}
    left = [tags.get((part.path, part.product, side, call)) for side in SIDES]
    for position, (number, type) in enumerate(zip(numbers, types, strict=True)):
        cast = None
        if isinstance(number, MXArray):
            cast = _cast_behind(eqn.invars[number.codes], made)
        operands.append(None if cast is None else _operand(cast, work, number.codes))
        side, tag = SIDES[position], left[position]
        if part.product == "output" and type.format is not None and tag is None:
            rule = STORED if cast is None else cast.call.scale_rule.name
            tag = Tag(
                path=part.path,
                product="output",
                side=side,
                axis=type.axes.block_axis,
                format=type.format.name,
                rule=rule,
                call=call,
            )
            stored.append(tag)
        else:
            stored.append(None)
        left[position] = tag
    # Of a gradient's product the right operand of the recipe may be the left one of the call.
    formats = [own.format for own in types if own.format is not None]
    for side, tag in zip(SIDES, left, strict=True):
        if tag is not None:
            texts[side] = tag.format, tag.rule
            if (same := next((x for x in formats if x.name == tag.format), None)) is not None:
                formats.remove(same)
    for side in SIDES:
        if side not in texts:
            texts[side] = (formats.pop().name, STORED) if formats else (HIGH, HIGH)
    format, rule = map(" x ".join, zip(*(texts[side] for side in SIDES), strict=True))
    tag = Tag(**part._asdict(), format=format, rule=rule, call=call)
    return _entry(own.site, product=tag, operands=tuple(operands), stored=tuple(stored))


def _cast_behind(variable: Any, made: dict[Any, JaxprEqn]) -> Cast | None:
    """The cast whose codes a variable holds, as they are."""
    while not isinstance(variable, Literal) and (eqn := made.get(variable)) is not None:
        for cast in casts_in(eqn):
            if cast.results[0] is variable:
                return cast
        if eqn.primitive.name not in _PASSING:
            return None
        variable = eqn.invars[eqn.outvars.index(variable)]
    return None


def _operand(cast: Cast, work: Any, number: int) -> Operand | None:
    """What is behind an operand's codes, mapped as they are."""
    mapped = [axes[number] for _, axes in work.batches]
    if sum(axis is not None for axis in mapped) != len(cast.axes):
        return None
    own = iter(cast.axes)
    return Operand(cast.before, tuple(None if axis is None else next(own) for axis in mapped))


# What of it is observed ---------------------------------------------------------------------------


class State(NamedTuple):
    """What goes down to the bodies of loops.

    Attributes:
      step: of training, int32; -1 if it is not known.
      index: of the iteration, for each loop around, outermost first.
    """

    step: jax.Array
    index: tuple[jax.Array, ...] = ()


class Observed(NamedTuple):
    """Statistics of one cast or product, before they are sent to the host."""

    entry: Entry
    tag: Tag
    raw: Raw


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """The rule of a rewritten program: equations compute what they did, and are observed.

    Attributes:
      stats: names of statistics.
      send: is given what was observed in one body, and the body's state.
    """

    stats: frozenset[str]
    send: Callable[[Sequence[Observed], State], None]
    # Of each body that runs, the innermost last: meshes in context, and what was observed there.
    _bodies: list[list[tuple[JaxprEqn, Observed]]] = dataclasses.field(default_factory=list)

    def below(self, state: State, number: int) -> State:
        return state

    def entering(self, plan: Plan, state: State) -> State:
        return state

    def shared(self, state: State) -> State:
        return state

    def counts(self, state: State) -> bool:
        return True

    def iteration(self, state: State, index: jax.Array | None) -> State:
        assert index is not None
        return state._replace(index=(*state.index, index.astype(jnp.int32)))

    def context(self, eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

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
        operands = list(map(read, eqn.invars))
        results = list(eqn.primitive.bind(*operands, **eqn.params))
        known = dict(zip(eqn.outvars, results, strict=True))
        for cast, tag in zip(casts_in(eqn), entry.casts, strict=False):
            if tag is not None:
                before = read(cast.before)
                self._add(eqn, entry, tag, self._of_cast(cast, tag, before, known))
        if entry.product is not None or any(entry.stored):
            self._of_product(eqn, entry, read, operands, results[0])
        return results

    def _add(self, eqn: JaxprEqn, entry: Entry, tag: Tag, raw: Raw) -> None:
        self._bodies[-1].append((eqn, Observed(entry, tag, statistics.of_shards(raw))))

    def _of_cast(self, cast: Cast, tag: Tag, before: jax.Array, known: dict[Any, Any]) -> Raw:
        def of_lane(before: jax.Array, *results: jax.Array) -> Raw:
            return self._cast(before, cast.array(results), tag)

        axes = [(axis, *[0] * len(cast.results)) for axis in cast.axes]
        return _of_lanes(of_lane, axes)(before, *(known[own] for own in cast.results))

    def _cast(self, before: jax.Array | None, after: MXArray, tag: Tag) -> Raw:
        assert tag.axis is not None
        raw = statistics.of_cast(before, after, tag.axis, self.stats)
        if ARRAYS in self.stats:
            raw |= {"after": values(after)} | ({} if before is None else {"before": before})
        return raw

    def _of_product(
        self, eqn: JaxprEqn, entry: Entry, read: Read, operands: Values, result: jax.Array
    ) -> None:
        """A product, and its operands that came quantized."""
        work, behind = eqn.params["work"], [own for own in entry.operands if own is not None]
        given = [*(read(own.variable) for own in behind), result, *operands]
        axes = [
            (*(own.axes[i] for own in behind), 0, *mapped)
            for i, (_, mapped) in enumerate(work.batches)
        ]

        def parts(*arrays: jax.Array) -> Any:
            """The values behind both operands, both operands, what else there is; the result."""
            of_lane = iter(arrays)
            known = [None if own is None else next(of_lane) for own in entry.operands]
            result = next(of_lane)
            return known, jax.tree.unflatten(work.tree, list(of_lane)), result

        for position, tag in enumerate(entry.stored):
            if tag is not None:

                def of_operand(*arrays: jax.Array, position: int = position, tag: Tag = tag) -> Raw:
                    known, own, _ = parts(*arrays)
                    return self._cast(known[position], unpacked(own[position]), tag)

                self._add(eqn, entry, tag, _of_lanes(of_operand, axes)(*given))
        if entry.product is None or not self.stats & {"error", ARRAYS}:
            return

        def of_lane(*arrays: jax.Array) -> Raw:
            known, (lhs, rhs, *others), actual = parts(*arrays)
            exact = [
                values(own) if before is None else before
                for before, own in zip(known, (lhs, rhs), strict=True)
            ]
            return self._product(work.call, exact, others, actual)

        self._add(eqn, entry, entry.product, _of_lanes(of_lane, axes)(*given))

    def _product(
        self,
        call: MatmulCall | RaggedCall,
        operands: Sequence[jax.Array],
        others: Sequence[jax.Array],
        actual: jax.Array,
    ) -> Raw:
        """A product against that of the values behind its operands in float32."""
        steps: list[dict[int, int]] = [{}, {}, {}]
        if ARRAYS not in self.stats:
            steps = _sample(call, operands)
        lhs, rhs = (
            _every(x.astype(jnp.float32), own) for x, own in zip(operands, steps, strict=False)
        )
        wide = dataclasses.replace(
            call,
            lhs=OperandType.of(lhs, call.lhs.axes),
            rhs=OperandType.of(rhs, call.rhs.axes),
            out_dtype=np.dtype(np.float32),
            precision=lax.Precision.HIGHEST,
        )
        before = REFERENCE.run(wide, lhs, rhs, *others)
        raw = statistics.of_product(before, _every(actual, steps[2]), actual)
        return raw | {"before": before, "after": actual} if ARRAYS in self.stats else raw


def _of_lanes(of_lane: Callable[..., Raw], batches: Sequence[tuple[int | None, ...]]) -> Any:
    """Statistics of all lanes of `vmap`s, the innermost first, whose operands have these axes."""
    for axes in batches:
        mapped = jax.vmap(of_lane, axes)
        of_lane = lambda *arrays, mapped=mapped: statistics.of_lanes(mapped(*arrays))  # noqa: E731
    return of_lane


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
