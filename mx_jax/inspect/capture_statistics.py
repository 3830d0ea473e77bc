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
from jax import lax
from jax.sharding import PartitionSpec

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.codecs.varying import varying
from mx_jax.formats import ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import dequantize

Raw = dict[str, jax.Array]

STATISTICS = ("amax", "scales", "underflow", "saturation", "nonfinite", "sqnr", "channels", "error")
"""What `capture` can compute; `"arrays"` besides, which is not among its defaults."""

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
# What float32's exponent field says of 1.
_ONE = 127
# Values of half of that field, and what float32 counts exactly.
_HALF, _EXACT = 16, 2**24


def of_cast(before: jax.Array, after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What the wanted statistics of a cast need.

    Args:
      before: values.
      after: what they became.
      axis: along which channels are counted.
      wanted: some of `STATISTICS`.
    """
    x = before.astype(jnp.float32)
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    values = _values(after)
    others = tuple(other for other in range(x.ndim) if other != axis % x.ndim)
    channels = jnp.max(size, axis=others)
    raw = {"amax": jnp.max(channels), "size": jnp.full((), x.size, jnp.uint32)}
    if "scales" in wanted:
        raw["exponents"] = _exponents(after)
    if "underflow" in wanted:
        raw["underflow"] = _count((x != 0) & (values == 0))
    if "saturation" in wanted:
        at_limit = _at_limit(after.codes, after.format.element)
        raw["saturated"] = _count(at_limit & (jnp.abs(x) > jnp.abs(values)))
    if "nonfinite" in wanted:
        bad, inside = block_shapes.split(~jnp.isfinite(x), after.blocks)
        bad = jnp.any(bad, axis=inside)
        raw |= {"bad_blocks": _count(bad), "blocks": jnp.full((), bad.size, jnp.uint32)}
    if "sqnr" in wanted:
        raw |= _noise(x, values, raw["amax"])
    if "channels" in wanted:
        raw["channel_amax"] = _whole(channels)
    return raw


def of_stored(after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What can be told of an operand that came quantized: nothing of what the cast lost.

    Args:
      after: the operand.
      axis: along which channels are counted.
      wanted: some of `STATISTICS`.
    """
    return of_cast(_values(after), after, axis, frozenset(wanted) - _LOSSES)


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
    x, y = _relative(x, amax), _relative(y, amax)
    return {
        "amax": amax,
        "size": jnp.full((), actual.size, jnp.uint32),
        "compared": jnp.full((), x.size, jnp.uint32),
        "bad": _count(~both),
        "dot": _sum(x * y),
        "exact": _sum(x * x),
        "actual": _sum(y * y),
        "noise": _sum(jnp.square(x - y)),
    }


def _values(after: MXArray) -> jax.Array:
    """What an operand stands for, in float32, by the fastest kernel: finite codes stay finite."""
    values = dequantize(dataclasses.replace(after, primal=None), jnp.float32)
    element, largest = after.format.element, float(jnp.finfo(jnp.float32).max)
    finite = jnp.clip(values, -largest, largest)
    if not element.has_inf:
        return finite
    half = after.codes & (element.sign_code - 1)
    return jnp.where(half == element.max_code + 1, values, finite)


def _at_limit(codes: jax.Array, element: ElementFormat) -> jax.Array:
    """Where codes are the largest, of either sign; NaN and Inf count too."""
    half = codes & (element.sign_code - 1)
    if element.kind == "int":
        half = jnp.where(codes & element.sign_code, element.sign_code - half, half)
    return half >= element.max_code


def _exponents(after: MXArray) -> jax.Array:
    """How many scales have which exponent, by float32's field of it.

    Of both halves of the field a row of 0 and 1; their product counts pairs of halves. That is 32
    comparisons a scale, not 256, and no scatter.
    """
    bits = float32.to_bits(_whole(after.scale_values).astype(jnp.float32))
    field = (bits >> 23) & 0xFF
    half = jnp.arange(_HALF, dtype=field.dtype)
    high, low = (
        (part[..., None] == half).astype(jnp.float32) for part in (field // _HALF, field % _HALF)
    )
    # float32 counts no further, so that huge arrays are counted by rows.
    rows = tuple(range(field.ndim - 1)) if field.size > _EXACT else ()
    along = tuple(range(len(rows), field.ndim))
    counts = lax.dot_general(high, low, ((along, along), (rows, rows)))
    return jnp.sum(counts.astype(jnp.uint32), axis=rows, dtype=jnp.uint32).ravel()


def _noise(x: jax.Array, values: jax.Array, amax: jax.Array) -> Raw:
    x = _relative(x, amax)
    # Finite only where both are.
    noise = x - _relative(values, amax)
    both = jnp.isfinite(noise)
    return {
        "signal": _sum(jnp.where(both, x * x, 0)),
        "noise": _sum(jnp.where(both, noise * noise, 0)),
    }


def _relative(x: jax.Array, amax: jax.Array) -> jax.Array:
    """x over the power of two of amax: less than 4, and as exact as x."""
    return x * _power(-_exponent(amax))


def _exponent(amax: jax.Array) -> jax.Array:
    return jnp.clip(float32.to_bits(amax) >> 23, 1, 253) - _ONE


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent; 0 where that is no normal number."""
    return float32.from_bits(jnp.maximum(exponent + _ONE, 0) << 23)


def _whole(x: jax.Array) -> jax.Array:
    """x in one piece, where types say that it is in several: what sorts it wants it so."""
    if explicit_sharding(x) is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))


def _sum(x: jax.Array) -> jax.Array:
    # Two short sums err less than a long one.
    return jnp.sum(jnp.sum(x, axis=-1)) if x.ndim else x


def _count(x: jax.Array) -> jax.Array:
    # Rows in float32, exact as long as they are short: XLA's CPU sums it twice as fast.
    wide = x.ndim == 0 or x.shape[-1] > _EXACT
    rows = x if wide else jnp.sum(x.astype(jnp.float32), axis=-1).astype(jnp.uint32)
    return jnp.sum(rows, dtype=jnp.uint32)


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


def _joined(raw: Raw, maximum: Any, total: Any) -> Raw:
    """Maxima of maxima, sums of sums; squares once they are relative to the same; arrays as they
    are."""
    amax = maximum(raw["amax"])
    share = jnp.square(_power(_exponent(raw["amax"]) - _exponent(amax)))
    joined = {}
    for name, value in raw.items():
        if name in ARRAYS:
            joined[name] = value
        elif name in _MAXIMA:
            joined[name] = maximum(value)
        else:
            joined[name] = total(value * share if name in _SQUARES else value)
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
