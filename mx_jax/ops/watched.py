"""The differentiable product as those see it who watch: its casts, and its error, with their tags.

What a forward product was is told in the backward pass if there is one: `jax.checkpoint` computes
forward products twice, and their gradients once. Without a gradient the forward product tells.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from mx_jax.axes import Side
from mx_jax.mxarray import MXArray
from mx_jax.ops.product import (
    Cast,
    Primal,
    Product,
    Residual,
    noted_casts,
    only,
    product_bwd,
    product_fwd,
    stored_sides,
    sum_over,
    values,
    zero_cotangents,
)
from mx_jax.ops.tags import (
    GRADIENT,
    Free,
    Moment,
    Place,
    Sample,
    Tag,
    entered,
    moment,
    numbers,
    place,
    watching,
)
from mx_jax.ops.tags import Product as Name
from mx_jax.packed import Quantized, unpacked

# The rule of operands that came quantized, as tags have it.
STORED = "stored"


@dataclasses.dataclass(frozen=True)
class Sight:
    """An operand before its cast and after, or a product in float32 and as it is.

    Attributes:
      tag: what it is.
      before: the values; None of an operand that came quantized.
      after: an MXArray, or the product.
      compared: of a product, the entries that before has: all of them, or a sample.
    """

    tag: Tag
    before: jax.Array | None
    after: MXArray | jax.Array
    compared: jax.Array | None = None


class Errors(NamedTuple):
    """A product beside what it would be in float32.

    Attributes:
      exact: in float32; of a large one a sample.
      compared: the same entries as they are.
      actual: all of them.
    """

    exact: jax.Array
    compared: jax.Array
    actual: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """What can be seen of one of the three products; nothing is computed before it is asked for.

    Attributes:
      name: of the product.
      casts: what it quantized, and perhaps other products.
      errors: the product in float32, of all entries or of a sample; the same of the product as it
        is, and all of that.
      given: the operands as they came, of the forward product.
    """

    tap: "Tap"
    name: Name
    casts: Mapping[tuple[Name, Side], Cast]
    errors: Callable[[bool], Errors]
    given: tuple[Any, Any] = (None, None)

    def sights(self, whole: bool) -> Iterator[tuple[Tag, Callable[[], Sight]]]:
        """Tags, and the sights that they are of.

        Args:
          whole: whether all entries of a product are compared, however many there are.
        """
        sides: tuple[Side, Side] = ("lhs", "rhs")
        found = [
            self.casts.get((self.name, side)) or _stored(given)
            for side, given in zip(sides, self.given, strict=True)
        ]
        for side, cast in zip(sides, found, strict=True):
            if cast is not None:
                tag = self._tag(side, cast.axis, cast.after.format.name, cast.rule)
                yield tag, functools.partial(Sight, tag, cast.before, cast.after)
        if any(found):
            formats = self._both(found, lambda cast: cast.after.format.name)
            tag = self._tag(None, None, formats, self._both(found, lambda cast: cast.rule))
            yield tag, lambda: self._compared(tag, whole)

    def _compared(self, tag: Tag, whole: bool) -> Sight:
        errors = self.errors(whole)
        return Sight(tag, errors.exact, errors.actual, errors.compared)

    def _tag(self, side: Any, axis: int | None, format: str, rule: str) -> Tag:
        tap = self.tap
        return Tag(
            path=tap.path,
            product=self.name,
            side=side,
            axis=axis,
            format=format,
            rule=rule,
            call=tap.call,
        )

    def _both(self, found: Sequence[Any], text: Callable[[Any], str]) -> str:
        return " x ".join("high precision" if cast is None else text(cast) for cast in found)


class Stored(NamedTuple):
    """An operand that came quantized: what it was before, and by which rule, nothing says."""

    after: MXArray
    axis: int
    before: None = None
    rule: str = STORED


def _stored(operand: Any) -> Stored | None:
    if not isinstance(operand, Quantized):
        return None
    after = unpacked(operand)
    assert isinstance(after, MXArray)
    # Square blocks have two axes; the last one named is the contracting one's.
    return Stored(after, after.blocks[-1][0])


class Watcher(Protocol):
    """Who watches products; equal only to itself, since jit's key has it.

    Attributes:
      uses: the trace that met a path last from nowhere, and how often it did.
      calls: the uses of each path, numbered.
    """

    uses: dict[str, tuple[Any, int]]
    calls: dict[str, dict[tuple[int, ...], int]]

    def looks_at(self, step: int) -> bool:
        """Whether a step concerns it."""
        ...

    def told(self, step: int) -> AbstractContextManager[Any]:
        """A context of a step that no program has."""
        ...

    def look(self, look: Look, now: Moment) -> Any:
        """What is to be told, as arrays."""
        ...

    def tell(self, seen: Any, looks: Sequence[Look], tap: "Tap", now: Moment) -> None:
        """Tell what `look` gave, or None, and what else can be seen."""
        ...


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where a product is watched from, and by whom.

    Attributes:
      watchers: who.
      path: of the product's module.
      call: which use of the path this is in its function.
      order: place in the order in which a trace met loops and products.
    """

    watchers: tuple[Watcher, ...]
    path: str
    call: int
    order: tuple[int, ...]


def tap_here() -> Tap:
    """The tap of a product that is being traced here."""
    here: Place = place.value
    watchers: tuple[Watcher, ...] = watching.value
    path = here.path or "unnamed"
    # Numbered as they come, once for all traces: a shared module in another is one number too.
    known = watchers[0].calls.setdefault(path, {})
    call = known.setdefault(entered(here).calls, len(known))
    return Tap(watchers, path, call, (*here.loops, next(numbers)))


def watched(product: Product, lhs: Primal, rhs: Primal, extra: Any) -> Any:
    """`differentiable`, told to whoever watches."""
    return _watched(product, tap_here(), lhs, rhs, extra, moment())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _watched(product: Product, tap: Tap, lhs: Primal, rhs: Primal, extra: Any, now: Moment) -> Any:
    with noted_casts() as casts:
        result = product.forward(lhs.operand, rhs.operand, extra, stored_sides(lhs, rhs))
    look = _forward_look(product, tap, lhs, rhs, extra, result, casts)
    for watcher in tap.watchers:
        watcher.tell(None, (look,), tap, now)
    return result


def _watched_fwd(product, tap, lhs, rhs, extra, now):
    with noted_casts() as casts:
        result, residuals = product_fwd(product, lhs, rhs, extra)
    look = _forward_look(product, tap, lhs, rhs, extra, result, casts)
    seen = tuple(watcher.look(look, now) for watcher in tap.watchers)
    return result, (residuals, seen, now)


def _watched_bwd(product, tap, residuals, g):
    kept, seen, now = residuals
    with noted_casts() as casts:
        cotangents = product_bwd(product, kept, g)
    looks = tuple(_backward_looks(product, tap, kept, g, cotangents[:2], casts))
    for watcher, own in zip(tap.watchers, seen, strict=True):
        watcher.tell(own, looks, tap, now)
    return *cotangents, zero_cotangents(now)


_watched.defvjp(_watched_fwd, _watched_bwd)


def _forward_look(product, tap, lhs, rhs, extra, result, casts) -> Look:
    def errors(whole: bool) -> Errors:
        exact, actual = product.in_high_precision(), only(result)
        operands = values(lhs.operand), values(rhs.operand)
        sample = Sample.of(() if whole else exact.free(None), operands, actual)
        left, right = map(sample.operand, operands, (0, 1))
        return Errors(exact.forward(left, right, extra), sample.product(actual), actual)

    return Look(tap, "output", casts, errors, (lhs.operand, rhs.operand))


def _backward_looks(
    product: Product, tap: Tap, kept: Any, g: Any, found: Sequence[Primal], casts: Any
) -> Iterator[Look]:
    """Of both gradients, those that there are."""
    lhs, rhs, avals, saved = kept
    sides: tuple[Side, Side] = ("lhs", "rhs")
    for side, own, other, aval, given in zip(
        sides, (lhs, rhs), (rhs, lhs), avals, found, strict=True
    ):
        if aval is None:
            continue

        def errors(
            whole: bool, side: Side = side, own=own, other=other, aval=aval, given=given
        ) -> Errors:
            wide = dataclasses.replace(aval, dtype=np.dtype(np.float32))
            exact, actual = product.in_high_precision(), given.value
            assert actual is not None
            operands = only(g), values(other)
            sample = Sample.of(() if whole else _free(exact, side, own), operands, actual)
            left, right = map(sample.operand, operands, (0, 1))
            value = sum_over(exact.gradient(side, left, right, wide, saved), aval.varying)
            if isinstance(own, Residual):
                value = product.masked(side, value, own.unmasked(), saved)
            return Errors(value, sample.product(actual), actual)

        yield Look(tap, GRADIENT[side], casts, errors)


def _free(product: Product, side: Side, own: Any) -> tuple[Free, ...]:
    """Along which axes a gradient can be compared in part: what turned the kept operand takes all
    that the other one gives."""
    free = product.free(side)
    return tuple(axis for axis in free if not axis.operand) if isinstance(own, Residual) else free
