"""Statistics of casts: one row of `TABLE` for each.

On the device a statistic is a few sums and maxima, so that those of vmap's lanes and of shards add
up to those of the whole; the host makes numbers of them. Squares are of values over the largest
one's power of two: gradients of 1e-25 have an SQNR too.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import CastStatisticsCall
from mx_jax.backends.primitive import bind
from mx_jax.codecs.blocks import varying_axes
from mx_jax.codecs.explicit_axes import varying
from mx_jax.mxarray import MXArray
from mx_jax.reference.statistics import Raw, exponent, power

Stats = Mapping[str, Any]

NUM_CHANNELS = 8
# What float32's exponent field says of 1.
_ONE = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistic:
    """One statistic."""

    name: str  # as `capture` takes it
    # Arrays that it needs, and how those of lanes and shards join: "max", "sum", or
    # "squares", sums of squares of what was divided by amax's power of 2.
    joins: Mapping[str, str]
    # Numbers for `Record.stats`, of these arrays and `size` on the host.
    of: Callable[[Stats], dict[str, Any]]
    # Computes them of a cast: of the values, of what they became, and the channels' axis.
    # None: `reference.statistics` has them, and kernels may.
    arrays: Callable[[jax.Array, MXArray, int], Raw] | None = None
    shown: str | None = None  # which of the numbers tables have


def _ratio(over: float, under: float) -> float:
    if under == 0:
        return math.nan if over == 0 else math.inf
    return over / under


def _scales(raw: Stats) -> dict[str, Any]:
    counts = raw["exponents"]
    present = counts.nonzero()[0]
    return {"scales": dict(zip((present - _ONE).tolist(), counts[present].tolist(), strict=True))}


def _sqnr(raw: Stats) -> dict[str, Any]:
    ratio = _ratio(float(raw["signal"]), float(raw["noise"]))
    return {"sqnr_db": 10 * math.log10(ratio) if ratio > 0 else ratio and -math.inf}


def _channels(raw: Stats) -> dict[str, Any]:
    """The largest channels, of equal ones the first; the largest over the one in the middle."""
    amaxes = raw["channel_amax"]
    order = (-amaxes).argsort(kind="stable")
    ranked = amaxes[order]
    # `np.median` takes longer than the sort.
    median = (ranked[(order.size - 1) // 2] + ranked[order.size // 2]) / 2
    pairs = zip(order[:NUM_CHANNELS].tolist(), ranked[:NUM_CHANNELS].tolist(), strict=True)
    return {
        "channels": [[index, amax] for index, amax in pairs],
        "outlier_ratio": _ratio(float(ranked[0]), float(median)),
    }


TABLE = (
    Statistic(
        name="amax",
        joins={"amax": "max"},
        of=lambda raw: {"amax": float(raw["amax"])},
        shown="amax",
    ),
    Statistic(name="scales", joins={"exponents": "sum"}, of=_scales),
    Statistic(
        name="underflow",
        joins={"underflow": "sum"},
        of=lambda raw: {"underflow": float(raw["underflow"]) / float(raw["size"])},
        shown="underflow",
    ),
    Statistic(
        name="saturation",
        joins={"saturated": "sum"},
        of=lambda raw: {"saturation": float(raw["saturated"]) / float(raw["size"])},
        shown="saturation",
    ),
    Statistic(
        name="nonfinite",
        joins={"bad_blocks": "sum", "blocks": "sum"},
        of=lambda raw: {"nonfinite_blocks": int(raw["bad_blocks"]), "blocks": int(raw["blocks"])},
        shown="nonfinite_blocks",
    ),
    Statistic(
        name="sqnr",
        joins={"signal": "squares", "noise": "squares"},
        of=_sqnr,
        shown="sqnr_db",
    ),
    Statistic(
        name="channels",
        joins={"channel_amax": "max"},
        of=_channels,
        shown="outlier_ratio",
    ),
)
STATISTICS = tuple(row.name for row in TABLE)
"""What `capture` can compute:

- `"amax"`, of the finite values;
- `"scales"`: how many scales have which exponent;
- `"underflow"`, `"saturation"`: shares of values that became zero, or the largest code though they
  are larger;
- `"nonfinite"`: blocks with Inf or NaN, and blocks in all, `nonfinite_blocks` and `blocks`;
- `"sqnr"`: signal to quantization noise, in dB, `sqnr_db`;
- `"channels"`: the largest amaxes along the axis of the blocks, pairs of index and amax, and the
  first over the median, `outlier_ratio`;
- `"arrays"`, only if named: the values before and after, whole on one device, even where they are
  sharded. Below `shard_map` each device gives a record with its part, and `Record.shard` says
  which. A product of the `before` of both sides is what a product of the `after` should be.
"""
ARRAYS = frozenset({"before", "after"})
"""What raw statistics may hold besides: arrays of the user, which do not join."""


def of_cast(before: jax.Array, after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What the wanted statistics of a cast need."""
    rows = [row for row in TABLE if row.name in wanted]
    after = dataclasses.replace(after, primal=None)
    call = CastStatisticsCall(
        shape=after.shape,
        dtype=np.dtype(before.dtype),
        format=after.format,
        blocks=after.blocks,
        axis=axis % before.ndim - before.ndim,
        scale_axes=varying_axes(after.tensor_scale),
    )
    raw: Raw = {}
    for row in rows:
        raw |= {} if row.arrays is None else row.arrays(before, after, axis)
    needed = {"amax", "size"}.union(*(row.joins for row in rows if row.arrays is None))
    # XLA leaves out what is not wanted.
    counted = bind(call, before, after)
    return raw | {name: value for name, value in counted.items() if name in needed}


def of_lanes(raw: Raw) -> Raw:
    """The statistics of all lanes of a vmap, which lie along a first axis."""
    return _joined(
        raw, lambda value: jnp.max(value, axis=0), lambda value: jnp.sum(value, 0, value.dtype)
    )


def of_shards(raw: Raw) -> Raw:
    """The statistics of all shards, below shard_map; elsewhere what they are."""
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    # With `check_vma=False` JAX does not say what differs: there, replicas count several times.
    if any(varying(lax.axis_index(axis)) for axis in axes):
        axes = varying(raw["amax"])
    if not axes:
        return raw
    names = tuple(sorted(axes))
    return _joined(raw, lambda value: lax.pmax(value, names), lambda value: lax.psum(value, names))


def _joined(
    raw: Raw, maximum: Callable[[jax.Array], jax.Array], summed: Callable[[jax.Array], jax.Array]
) -> Raw:
    """Each array as its row says; arrays of the user as they are."""
    amax = maximum(raw["amax"])
    share = jnp.square(power(exponent(raw["amax"]) - exponent(amax)))
    joins = {"size": "sum"} | {name: how for row in TABLE for name, how in row.joins.items()}
    joined = {}
    for name, value in raw.items():
        if name in ARRAYS:
            joined[name] = value
        elif joins[name] == "max":
            joined[name] = maximum(value)
        else:
            joined[name] = summed(value * share if joins[name] == "squares" else value)
    return joined


def numbers(raw: Stats, wanted: Collection[str]) -> dict[str, Any]:
    """`Record.stats` of raw statistics, on the host."""
    values: dict[str, Any] = {}
    for row in TABLE:
        if row.name in wanted:
            values |= row.of(raw)
    return values


def sqnr_db(exact: jax.typing.ArrayLike, approximate: jax.typing.ArrayLike) -> float:
    """Signal to quantization noise: `10 log10(sum exact^2 / sum (exact - approximate)^2)`, in dB.

    Args:
      exact: reference values.
      approximate: values of the same shape.

    Returns:
      A float; inf if nothing differs.

    Raises:
      ValueError: if the shapes differ.

    Examples:
      >>> import jax, mx_jax
      >>> x = jax.random.normal(jax.random.key(0), (256, 256))
      >>> round(mx_jax.inspect.sqnr_db(x, mx_jax.cast(x, "mxfp8_e4m3", scale_rule="rceil")))
      32
    """
    # In float64: squares of float32 values leave float32's range long before the values do.
    exact, approximate = np.asarray(exact, np.float64), np.asarray(approximate, np.float64)
    if exact.shape != approximate.shape:
        raise ValueError(
            "sqnr_db: shapes must agree, got "
            f"exact.shape={exact.shape}, approximate.shape={approximate.shape}"
        )
    noise = np.sum(np.square(exact - approximate))
    if noise == 0:
        return math.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(10.0 * np.log10(np.sum(np.square(exact)) / noise))
