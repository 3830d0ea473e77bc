"""The differentiable product while a capture runs: it reports its casts and its error, with tags.

A forward product is reported in the backward pass if there is one: `jax.checkpoint` computes
forward products twice, and their gradients once. Without a gradient the forward pass reports it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import explicit_sharding, partitions
from mx_jax.mxarray import MXArray
from mx_jax.ops import tags
from mx_jax.ops.product import (
    AnyProduct,
    Cast,
    CotangentAval,
    Extra,
    Primal,
    Product,
    ProductResiduals,
    noted_casts,
    product_bwd,
    product_fwd,
    stored_sides,
    sum_over,
    values,
    zero_cotangents,
)
from mx_jax.packed import Quantized, unpacked

Casts = Mapping[tuple[tags.Product, Side], Cast]

# The rule of operands that came quantized, as tags have it.
STORED = "stored"


class Observation(NamedTuple):
    """An operand before its cast and after, or a product in float32 and as it is."""

    before: jax.Array | None  # of a large product a sample; None of an operand that came quantized
    after: MXArray | jax.Array
    compared: jax.Array | None = None  # of a product, the entries of `after` that `before` has


@dataclasses.dataclass(frozen=True, eq=False)
class ObservedProduct:
    """One of the three products; nothing is computed before it is asked for."""

    site: "CallSite"
    name: tags.Product
    casts: Casts  # what it quantized, and perhaps other products
    # The product, of which all entries are compared or a sample.
    errors: Callable[[bool], Observation]
    # As they came, of the forward product.
    operands: tuple[AnyOperand | None, AnyOperand | None] = (None, None)

    def observations(self, whole: bool) -> Iterator[tuple[tags.Tag, Callable[[], Observation]]]:
        """Tags, and functions that compute their observations."""
        found = [
            self.casts.get((self.name, side)) or _stored(operand)
            for side, operand in zip(tags.SIDES, self.operands, strict=True)
        ]
        texts = [
            ("high precision",) * 2 if cast is None else (cast.after.format.name, cast.rule)
            for cast in found
        ]
        for side, cast, names in zip(tags.SIDES, found, texts, strict=True):
            if cast is not None:
                observed = functools.partial(Observation, cast.before, cast.after)
                yield self._tag(side, cast.axis, *names), observed
        if any(found):
            formats, rules = map(" x ".join, zip(*texts, strict=True))
            yield self._tag(None, None, formats, rules), lambda: self.errors(whole)

    def _tag(self, side: Side | None, axis: int | None, format: str, rule: str) -> tags.Tag:
        path, call = self.site.path, self.site.call
        return tags.Tag(
            path=path, product=self.name, side=side, axis=axis, format=format, rule=rule, call=call
        )


def _stored(operand: AnyOperand | None) -> Cast | None:
    """Of an operand that came quantized neither its values nor its scale rule are known."""
    if not isinstance(operand, Quantized):
        return None
    after = unpacked(operand)
    assert isinstance(after, MXArray)
    # Square blocks have two axes; the last one named is the contracting one's.
    return Cast(None, after, STORED, after.blocks[-1][0])


@dataclasses.dataclass(frozen=True)
class CallSite:
    """Where a product is called, and the captures there."""

    watchers: tuple[Any, ...]  # each an `inspect.capture.Capture`
    path: str
    call: int  # which use of the path this is in its function
    order: tuple[int, ...]  # place in the order in which a trace met loops and products


def watched(product: Product[Extra], lhs: Primal, rhs: Primal, extra: Extra) -> jax.Array:
    """`differentiable`, reported to the captures in context."""
    here: tags.Place = tags.place.value
    watchers: tuple[Any, ...] = tags.watching.value
    path = here.path or "unnamed"
    # Numbered as they come, once for all traces: a shared module in another is one number too.
    known = watchers[0].calls.setdefault(path, {})
    call = known.setdefault(tags.entered(here).calls, len(known))
    site = CallSite(watchers, path, call, (*here.loops, next(tags.numbers)))
    return _watched(product, site, lhs, rhs, extra, tags.counters())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _watched(
    product: Product[Extra],
    site: CallSite,
    lhs: Primal,
    rhs: Primal,
    extra: Extra,
    now: tags.Counters,
) -> jax.Array:
    with noted_casts() as casts:
        result = product.forward(lhs.operand, rhs.operand, extra, stored_sides(lhs, rhs))
    forward = _forward(product, site, lhs, rhs, extra, result, casts)
    for watcher in site.watchers:
        watcher.record(None, (forward,), site, now)
    return result


def _watched_fwd(product: AnyProduct, site: CallSite, left: Primal, right: Primal, *others: object):
    lhs, rhs, extra, now = jax.tree.map(lambda x: x.value, (left, right, *others))
    with noted_casts() as casts:
        result, (*kept, avals, _) = product_fwd(product, lhs, rhs, extra)
    # A gradient that nobody asked for is no part of the program that is watched.
    avals = tuple(
        aval if any(leaf.perturbed for leaf in jax.tree.leaves(given.value)) else None
        for aval, given in zip(avals, (left, right), strict=True)
    )
    residuals = (*kept, avals, extra)
    forward = _forward(product, site, lhs, rhs, extra, result, casts)
    seen = tuple(watcher.observe(forward, now) for watcher in site.watchers)
    return result, (residuals, seen, now)


def _watched_bwd(
    product: Product[Extra],
    site: CallSite,
    saved: tuple[ProductResiduals[Extra], tuple[Any, ...], tags.Counters],
    g: jax.Array,
):
    residuals, seen, now = saved
    g = jnp.zeros(g.shape, g.dtype) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
    with noted_casts() as casts:
        cotangents = product_bwd(product, residuals, g)
    products = tuple(_backward(product, site, residuals, g, cotangents[:2], casts))
    for watcher, own in zip(site.watchers, seen, strict=True):
        watcher.record(own, products, site, now)
    return *cotangents, zero_cotangents(now)


_watched.defvjp(_watched_fwd, _watched_bwd, symbolic_zeros=True)


def _forward(
    product: AnyProduct,
    site: CallSite,
    lhs: Primal,
    rhs: Primal,
    extra: object,
    result: jax.Array,
    casts: Casts,
) -> ObservedProduct:
    def errors(whole: bool) -> Observation:
        exact, actual = product.in_high_precision(), result
        operands = values(lhs.operand), values(rhs.operand)
        *steps, compared = _sample(() if whole else exact.free(None), operands, actual)
        left, right = map(_every, operands, steps)
        value = exact.forward(left, right, extra)
        return Observation(value, actual, _every(actual, compared))

    return ObservedProduct(site, "output", casts, errors, (lhs.operand, rhs.operand))


def _backward(
    product: Product,
    site: CallSite,
    residuals: ProductResiduals[Any],
    g: jax.Array,
    found: Sequence[Primal],
    casts: Casts,
) -> Iterator[ObservedProduct]:
    """Of both gradients, those that there are."""
    lhs, rhs, avals, extra = residuals
    for side, other, aval, given in zip(tags.SIDES, (rhs, lhs), avals, found, strict=True):
        if aval is None:
            continue

        def errors(
            whole: bool,
            side: Side = side,
            other: AnyOperand = other,
            aval: CotangentAval = aval,
            given: Primal = given,
        ) -> Observation:
            wide = dataclasses.replace(aval, dtype=np.dtype(np.float32))
            exact, actual = product.in_high_precision(), given.value
            assert actual is not None
            operands, free = (g, values(other)), () if whole else exact.free(side)
            *steps, compared = _sample(free, operands, actual)
            left, right = map(_every, operands, steps)
            value = sum_over(exact.gradient(side, left, right, wide, extra), aval.varying)
            return Observation(value, actual, _every(actual, compared))

        yield ObservedProduct(site, tags.GRADIENT[side], casts, errors)


# What of a product is compared --------------------------------------------------------------------

POSITIONS = 128
"""Of each operand: a product whose operands keep no more is compared as a whole."""


def _sample(
    free: Sequence[tags.Free], operands: Sequence[jax.Array], product: jax.Array
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Distances between compared positions along axes of both operands, and of their product."""
    found: tuple[dict[int, int], ...] = ({}, {}, {})
    for number, operand in enumerate(operands):
        # Along axes that are whole, where types say where arrays lie.
        own = [
            axis
            for axis in free
            if axis.operand == number
            and _whole(operand, axis.axis)
            and _whole(product, axis.result)
        ]
        steps = strides([operand.shape[axis.axis] for axis in own])
        for axis, step in zip(own, steps, strict=True):
            found[number][axis.axis] = found[2][axis.result] = step
    left, right, result = found
    return left, right, result


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


def _whole(x: jax.Array, axis: int) -> bool:
    sharding = explicit_sharding(x)
    return sharding is None or partitions(sharding, x.ndim)[axis] is None


def _every(x: jax.Array, steps: dict[int, int]) -> jax.Array:
    """Positions of an array at these distances along its axes; all where none is over 1."""
    if max(steps.values(), default=1) == 1:
        return x
    own = [steps.get(axis, 1) for axis in range(x.ndim)]
    return lax.slice(x, [0] * x.ndim, x.shape, own)
