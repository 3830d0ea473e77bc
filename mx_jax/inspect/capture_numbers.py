"""Statistics of casts and products as numbers: what the host makes of the sums and maxima."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mx_jax.inspect.capture_statistics import NUM_CHANNELS

# What float32's exponent field says of 1.
_ONE = 127


def finished(raw: Mapping[str, np.ndarray], wanted: Collection[str]) -> dict[str, Any]:
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
        found["scales"] = {int(e) - _ONE: int(counts[e]) for e in np.flatnonzero(counts)}
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


def _channels(raw: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, Any]:
    """The largest channels, of equal ones the first, their amaxes, and the amax in the middle."""
    if "channel" in raw:
        return raw["channel"], raw["largest"], raw["median"]
    amaxes = raw["channel_amax"]
    order = np.argsort(-amaxes, kind="stable")
    middle = amaxes[order[(len(order) - 1) // 2 : len(order) // 2 + 1]]
    where = order[:NUM_CHANNELS]
    return where, amaxes[where], middle.mean()


def _decibel(signal: float, noise: float) -> float:
    ratio = _ratio(signal, noise)
    return 10 * math.log10(ratio) if ratio > 0 else ratio and -math.inf


def _ratio(over: float, under: float) -> float:
    if under == 0:
        return math.nan if over == 0 else math.inf
    return over / under
