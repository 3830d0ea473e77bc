"""Statistics of casts and products: one row of `TABLE` for each, with all that is its own.

On the device a statistic is a few sums and maxima, so that those of vmap's lanes and of shards add
up to those of the whole; the host makes numbers of them. Squares are of values over the largest
one's power of two: gradients of 1e-25 have an SQNR too.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import CastStatisticsCall
from mx_jax.backends.primitive import bind
from mx_jax.codecs.blocks import varying_axes
from mx_jax.codecs.explicit_axes import varying
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import dequantize
from mx_jax.reference import statistics as plain
from mx_jax.reference.statistics import Raw, count, exponent, power, relative, total

Stats = Mapping[str, Any]

NUM_CHANNELS = 8
# What float32's exponent field says of 1.
_ONE = 127
# Beyond these a report has a sentence: shares of values, a ratio of amaxes, dB below the first.
_SATURATED, _UNDERFLOWN, _OUTLYING, _LOST_DB = 0.1, 0.3, 30.0, 6.0
# Less saturates in healthy runs: 3.5 % of normal values in NVFP4. So less is reported if it grew.
_MORE_SATURATED, _GROWN = 0.02, 3


class Column(NamedTuple):
    """A number of `Record.stats` as tables have it."""

    number: str
    heading: str
    # What tables for people have in its place.
    shown: Callable[[Stats], float | None] | None = None

    def text(self, stats: Stats, digits: int = 3) -> str:
        value = stats.get(self.number) if self.shown is None else self.shown(stats)
        return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"


class Plot(NamedTuple):
    """A number over steps, a section of a report; the sign is 1 if low is bad, -1 if high is."""

    heading: str
    number: str
    unit: str
    sign: int


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
    # None: `reference.statistics` has them, and kernels may, or `of_product`.
    arrays: Callable[[jax.Array, MXArray, int], Raw] | None = None
    columns: tuple[Column, ...] = ()  # those of the numbers that tables hold
    # What a report says of a record with the first of them, if anything; of its numbers,
    # and of the first finite ones that the same operand had.
    finding: Callable[[Stats, Stats], str | bool] = lambda stats, first: False
    plot: Plot | None = None  # a section of a report
    needs_before: bool = False  # whether it compares with the values before the cast


def nonfinite(stats: Stats) -> int:
    """Blocks with Inf or NaN; of a product, entries."""
    return stats.get("nonfinite_blocks", stats.get("nonfinite", 0))


def decibel(stats: Stats) -> float:
    """The SQNR of an operand, or of a product against float32; Inf where it is not known."""
    if stats.get("error", 0) > 0:
        return -20 * math.log10(stats["error"])
    sqnr = stats.get("sqnr_db", math.inf)
    return math.inf if math.isnan(sqnr) else sqnr


def _ratio(over: float, under: float) -> float:
    if under == 0:
        return math.nan if over == 0 else math.inf
    return over / under


def _percent(number: str) -> Callable[[Stats], float | None]:
    return lambda stats: 100 * stats[number] if number in stats else None


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
    # One partition finds the middle and the least of the largest without sorting the others.
    size, few = amaxes.size, min(NUM_CHANNELS, amaxes.size)
    low, high = (size - 1) // 2, size // 2
    parted = np.partition(amaxes, (low, high, size - few))
    where = (amaxes >= parted[size - few]).nonzero()[0]
    where = where[(-amaxes[where]).argsort(kind="stable")[:few]]
    median = parted[low] if low == high else (parted[low] + parted[high]) / 2
    pairs = zip(where.tolist(), amaxes[where].tolist(), strict=True)
    return {
        "channels": [[index, amax] for index, amax in pairs],
        "outlier_ratio": _ratio(float(amaxes[where[0]]), float(median)),
    }


def _error(raw: Stats) -> dict[str, Any]:
    exact, actual = float(raw["exact"]), float(raw["actual"])
    return {
        "error": math.sqrt(_ratio(float(raw["noise"]), exact)),
        "cosine": _ratio(float(raw["dot"]), math.sqrt(exact * actual)),
        "nonfinite": int(raw["bad"]),
        "entries": int(raw["size"]),
        "compared": int(raw["compared"]),
    }


TABLE = (
    Statistic(
        name="amax",
        joins={"amax": "max"},
        of=lambda raw: {"amax": float(raw["amax"])},
        columns=(Column("amax", "amax"),),
    ),
    Statistic(name="scales", joins={"exponents": "sum"}, of=_scales),
    Statistic(
        name="underflow",
        joins={"underflow": "sum"},
        of=lambda raw: {"underflow": float(raw["underflow"]) / float(raw["size"])},
        columns=(Column("underflow", "zero %", _percent("underflow")),),
        finding=lambda stats, first: (
            stats["underflow"] > _UNDERFLOWN
            and f"loses {stats['underflow']:.0%} of its values to zero"
        ),
        needs_before=True,
    ),
    Statistic(
        name="saturation",
        joins={"saturated": "sum"},
        of=lambda raw: {"saturation": float(raw["saturated"]) / float(raw["size"])},
        columns=(Column("saturation", "sat. %", _percent("saturation")),),
        finding=lambda stats, first: (
            stats["saturation"]
            > min(_SATURATED, max(_MORE_SATURATED, _GROWN * first.get("saturation", 0)))
            and f"saturates in {stats['saturation']:.1%} of its values"
        ),
        needs_before=True,
    ),
    Statistic(
        name="nonfinite",
        joins={"bad_blocks": "sum", "blocks": "sum"},
        of=lambda raw: {"nonfinite_blocks": int(raw["bad_blocks"]), "blocks": int(raw["blocks"])},
        columns=(Column("nonfinite_blocks", "bad", lambda stats: nonfinite(stats) or None),),
        finding=lambda stats, first: (
            stats["nonfinite_blocks"] > 0
            and f"has Inf or NaN in {stats['nonfinite_blocks']} blocks"
        ),
    ),
    Statistic(
        name="sqnr",
        joins={"signal": "squares", "noise": "squares"},
        of=_sqnr,
        columns=(Column("sqnr_db", "dB", decibel),),
        finding=lambda stats, first: (
            math.isfinite(stats["sqnr_db"])
            and first["sqnr_db"] - stats["sqnr_db"] > _LOST_DB
            and f"lost {first['sqnr_db'] - stats['sqnr_db']:.0f} dB of SQNR since its first step"
        ),
        plot=Plot("SQNR by layer", "sqnr_db", "dB", 1),
        needs_before=True,
    ),
    Statistic(
        name="channels",
        joins={"channel_amax": "max"},
        of=_channels,
        columns=(Column("outlier_ratio", "outlier"),),
        finding=lambda stats, first: (
            _OUTLYING < stats["outlier_ratio"] < math.inf
            and f"has an outlier: channel {stats['channels'][0][0]} is "
            f"{stats['outlier_ratio']:.0f} times the median"
        ),
    ),
    Statistic(
        name="error",
        joins={
            "compared": "sum",
            "bad": "sum",
            "dot": "squares",
            "exact": "squares",
            "actual": "squares",
            "noise": "squares",
        },
        of=_error,
        plot=Plot("Error of products by layer", "error", "|exact - actual| / |exact|", -1),
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
- `"error"`, of products: `|exact - actual| / |exact|` and their `cosine`, where exact is the
  product of the same operands in float32; of gradients too. A large product is compared in a fixed
  sample of its entries, `compared` of `entries`: the rows and columns at an odd distance, at most
  128 of each, so that one of 128 by 128 is compared as a whole;
- `"arrays"`, only if named: the values before and after, whole on one device, even where they are
  sharded. Below `shard_map` each device gives a record with its part, and `Record.shard` says
  which. Products are then compared as a whole.
"""
ARRAYS = frozenset({"before", "after"})
"""What raw statistics may hold besides: arrays of the user, which do not join."""


def of_cast(before: jax.Array | None, after: MXArray, axis: int, wanted: Collection[str]) -> Raw:
    """What the wanted statistics of a cast need; without `before` nothing of what it lost."""
    rows = [row for row in TABLE if row.name in wanted and row.name != "error"]
    if before is None:
        rows = [row for row in rows if not row.needs_before]
        before = plain.finite_values(after, dequantize)
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


def of_product(exact: jax.Array, compared: jax.Array, actual: jax.Array) -> Raw:
    """What a product's error and cosine need; `compared`: the entries of it that `exact` has."""
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
    """`Record.stats` of raw statistics, on the host; arrays of a product come with its error."""
    found: dict[str, Any] = {}
    for row in TABLE:
        if row.joins.keys() <= raw.keys() and row.name in {*wanted, "error"}:
            found |= row.of(raw)
    return found


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


def saturated_fraction(x: jax.typing.ArrayLike, quantized: MXArray) -> float:
    """The share of x whose magnitude is above what its block can represent, 0 to 1.

    Args:
      x: what was quantized.
      quantized: `quantize(x, ...)`.

    Returns:
      A float.

    Raises:
      ValueError: if the shapes differ.
      TypeError: if quantized is not an MXArray.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = jnp.array([7.9, 1.0, 2.0, 3.0])
      >>> mx_jax.inspect.saturated_fraction(x, mx_jax.quantize(x, "mxfp4"))
      0.25
    """
    if not isinstance(quantized, MXArray):
        raise TypeError(
            "saturated_fraction: needs an MXArray, got quantized of type "
            f"{type(quantized).__name__}; quantize x first"
        )
    if np.shape(x) != quantized.shape:
        raise ValueError(
            "saturated_fraction: shapes must agree, got "
            f"x.shape={np.shape(x)}, quantized.shape={quantized.shape}; pass what was quantized"
        )
    of_cast = jax.jit(plain.of_cast, static_argnames=("axis", "wanted"))
    raw = of_cast(jnp.asarray(x), quantized, axis=-1, wanted=("saturation",))
    return float(raw["saturated"]) / max(1, quantized.size)
