"""Statistics of casts and products: computed where the arrays are, and numbers on the host.

On the device a statistic is a few sums and maxima, so that those of vmap's lanes and of shards add
up to those of the whole. Squares are of values over the largest one's power of two: gradients of
1e-25 have an SQNR too.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import CastStatisticsCall
from mx_jax.backends.select import find
from mx_jax.codecs.blocks import varying_axes
from mx_jax.codecs.explicit_axes import varying
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import dequantize
from mx_jax.reference import statistics as plain
from mx_jax.reference.statistics import Raw, count, exponent, power, relative, total

STATISTICS = ("amax", "scales", "underflow", "saturation", "nonfinite", "sqnr", "channels", "error")
"""What `capture` can compute; `"arrays"` besides, which is not among its defaults."""

# What else than amax and sizes tells of a cast.
_TELLS = {
    "exponents": "scales",
    "underflow": "underflow",
    "saturated": "saturation",
    "bad_blocks": "nonfinite",
    "blocks": "nonfinite",
    "signal": "sqnr",
    "noise": "sqnr",
    "channel_amax": "channels",
}
# What takes the values before the cast.
_LOSSES = frozenset({"underflow", "saturation", "sqnr"})
ARRAYS = frozenset({"before", "after"})
"""What a raw record may hold besides statistics: arrays of the user."""
_MAXIMA = frozenset({"amax", "channel_amax"})
# Sums of squares of what was divided by amax's power of two.
_SQUARES = frozenset({"signal", "noise", "dot", "exact", "actual"})
NUM_CHANNELS = 8
# Channels that the host sorts.
_FEW = 2**13


def of_cast(before: jax.Array, after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What the wanted statistics of a cast need, by the fastest kernel.

    Args:
      before: values.
      after: what they became.
      axis: along which channels are counted.
      wanted: some of `STATISTICS`.
    """
    after = dataclasses.replace(after, primal=None)
    call = CastStatisticsCall(
        shape=after.shape,
        dtype=np.dtype(before.dtype),
        format=after.format,
        blocks=after.blocks,
        axis=axis % before.ndim - before.ndim,
        scale_axes=varying_axes(after.tensor_scale),
    )
    choice = find(call)
    if choice is None or choice.offer.is_plain:
        # Then only what is wanted, of values that a kernel may decode.
        return plain.of_cast(before, after, axis, wanted, dequantize)
    raw: Raw = choice.offer.run(before, after, call)
    return {name: own for name, own in raw.items() if _TELLS.get(name, "amax") in {*wanted, "amax"}}


def of_stored(after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What can be told of an operand that came quantized: nothing of what the cast lost.

    Args:
      after: the operand.
      axis: along which channels are counted.
      wanted: some of `STATISTICS`.
    """
    return of_cast(plain.finite_values(after, dequantize), after, axis, frozenset(wanted) - _LOSSES)


def of_product(exact: jax.Array, compared: jax.Array, actual: jax.Array) -> Raw:
    """What the error of a product and its cosine need.

    Args:
      exact: some entries, or all, in float32.
      compared: the same as they are.
      actual: all entries as they are.
    """
    x, y = (value.astype(jnp.float32) for value in (exact, compared))
    both = jnp.isfinite(x) & jnp.isfinite(y)
    x, y = jnp.where(both, x, 0), jnp.where(both, y, 0)
    largest = jnp.where(jnp.isfinite(actual), jnp.abs(actual), 0).astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(largest))
    x, y = relative(x, amax), relative(y, amax)
    return {
        "amax": amax,
        "size": jnp.full((), actual.size, jnp.uint32),
        "compared": jnp.full((), x.size, jnp.uint32),
        "bad": count(~both),
        "dot": total(x * y),
        "exact": total(x * x),
        "actual": total(y * y),
        "noise": total(jnp.square(x - y)),
    }


def of_lanes(raw: Raw, batched: Mapping[str, bool], lanes: int) -> Raw:
    """The statistics of all lanes of a vmap, which lie along a first axis where they differ."""
    if not any(batched.values()):
        return raw
    whole = {
        name: value if batched[name] else jnp.broadcast_to(value, (lanes, *value.shape))
        for name, value in raw.items()
    }
    return _joined(
        whole, lambda value: jnp.max(value, axis=0), lambda value: jnp.sum(value, 0, value.dtype)
    )


def of_shards(raw: Raw) -> Raw:
    """The statistics of all shards, below shard_map; elsewhere what they are.

    With `check_vma=False` JAX does not say what differs: there, replicas count several times.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = frozenset(mesh.manual_axes)
    if not axes:
        return raw
    if any(varying(lax.axis_index(axis)) for axis in axes):
        axes = frozenset[str]().union(*(varying(value) for value in raw.values()))
        raw = {
            name: lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value
            for name, value in raw.items()
            for missing in (axes - varying(value),)
        }
    names = tuple(sorted(axes))
    if not names:
        return raw
    return _joined(raw, lambda value: lax.pmax(value, names), lambda value: lax.psum(value, names))


def _joined(raw: Raw, maximum: Any, summed: Any) -> Raw:
    """Maxima of maxima, sums of sums; squares once they are relative to the same; arrays as they
    are."""
    amax = maximum(raw["amax"])
    share = jnp.square(power(exponent(raw["amax"]) - exponent(amax)))
    joined = {}
    for name, value in raw.items():
        if name in ARRAYS:
            joined[name] = value
        elif name in _MAXIMA:
            joined[name] = maximum(value)
        else:
            joined[name] = summed(value * share if name in _SQUARES else value)
    return joined


def shortened(raw: Raw) -> Raw:
    """What the host gets: of many channels only the largest, and the one in the middle. It sorts
    few of them itself, which is a tenth of the work."""
    if "channel_amax" not in raw or raw["channel_amax"].size <= _FEW:
        return raw
    channels = raw["channel_amax"]
    largest, where = lax.top_k(channels, NUM_CHANNELS)
    rest = {name: value for name, value in raw.items() if name != "channel_amax"}
    return rest | {"channel": where, "largest": largest, "median": jnp.median(channels)}
