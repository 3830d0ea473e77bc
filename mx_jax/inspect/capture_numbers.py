"""Statistics of casts and products as numbers: what the host makes of the sums and maxima."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mx_jax.inspect.capture_statistics import NUM_CHANNELS

# What float32's exponent field says of 1.
_ONE = 127


def finished(raw: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Statistics as numbers.

    Args:
      raw: what `capture_statistics.shortened` gave, on the host.
      wanted: of `capture_statistics.STATISTICS`.

    Returns:
      `amax`; `underflow` and `saturation` as shares; `nonfinite_blocks` and `blocks`; `sqnr_db`;
      `scales`, how many have which exponent; `channels`, pairs of index and amax, the largest
      first, and `outlier_ratio`, the largest over the middle one; of a product `error`,
      `|exact - actual| / |exact|`, and `cosine`, of `compared` of its `entries`, and how many of
      these are `nonfinite`.
    """
    found: dict[str, Any] = {"amax": float(raw["amax"])} if "amax" in wanted else {}
    size = float(raw["size"])
    for name, count in (("underflow", "underflow"), ("saturation", "saturated")):
        if count in raw:
            found[name] = float(raw[count]) / size
    if "blocks" in raw:
        found["nonfinite_blocks"], found["blocks"] = int(raw["bad_blocks"]), int(raw["blocks"])
    if "exponents" in raw:
        counts = raw["exponents"]
        there = counts.nonzero()[0]
        exponents = (there - _ONE).tolist()
        found["scales"] = dict(zip(exponents, counts[there].tolist(), strict=True))
    if "signal" in raw:
        found["sqnr_db"] = _decibel(float(raw["signal"]), float(raw["noise"]))
    if "channel_amax" in raw or "channel" in raw:
        where, largest, median = _channels(raw)
        pairs = zip(where.tolist(), largest.tolist(), strict=True)
        found["channels"] = [[index, amax] for index, amax in pairs]
        found["outlier_ratio"] = _ratio(float(largest[0]), float(median))
    if "dot" in raw:
        exact, actual = float(raw["exact"]), float(raw["actual"])
        found["error"] = math.sqrt(_ratio(float(raw["noise"]), exact))
        found["cosine"] = _ratio(float(raw["dot"]), math.sqrt(exact * actual))
        found["nonfinite"] = int(raw["bad"])
        found["entries"], found["compared"] = int(size), int(raw["compared"])
    return found


def _channels(raw: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, Any]:
    """The largest channels, of equal ones the first, their amaxes, and the amax in the middle."""
    if "channel" in raw:
        return raw["channel"], raw["largest"], raw["median"]
    amaxes = raw["channel_amax"]
    # A partition finds the middle and the least of the largest without sorting the others.
    size = len(amaxes)
    low, high, least = (size - 1) // 2, size // 2, max(size - NUM_CHANNELS, 0)
    parted = np.partition(amaxes, (low, high, least))
    where = (amaxes >= parted[least]).nonzero()[0]
    where = where[(-amaxes[where]).argsort(kind="stable")[:NUM_CHANNELS]]
    middle = parted[low] if low == high else (parted[low] + parted[high]) / 2
    return where, amaxes[where], middle


def _decibel(signal: float, noise: float) -> float:
    ratio = _ratio(signal, noise)
    return 10 * math.log10(ratio) if ratio > 0 else ratio and -math.inf


def _ratio(over: float, under: float) -> float:
    if under == 0:
        return math.nan if over == 0 else math.inf
    return over / under
