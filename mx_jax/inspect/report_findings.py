"""What is out of the ordinary in a run, in sentences: the first thing first."""

import math
from collections.abc import Mapping, Sequence

from mx_jax.inspect.capture_record import Record, Scalar

# Beyond these a sentence says so: shares of values, a ratio of amaxes, dB below a run's first step.
SATURATED, UNDERFLOWN, OUTLYING, LOST_DB = 0.1, 0.3, 30.0, 6.0
# Less saturates in healthy runs: 3.5 % of normal values in NVFP4. So less is told if it grew.
MORE_SATURATED, GROWN = 0.02, 3
# Layers of a scan that a sentence names; of more it tells how many.
NAMED = 6


def findings(records: Sequence[Record], scalars: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Sentences on what a reader should look at, what comes first in the run first.

    Layers of one scan share a sentence: that of the first of them, which names the others.

    Args:
      records: in the order of the run.
      scalars: numbers by name, in the order of the run.
    """
    found = [pair for name, own in scalars.items() for pair in _of_numbers(name, own)]
    told: dict[tuple[str, str], tuple[int, str]] = {}
    layers: dict[tuple[str, str], dict[tuple[int, ...], None]] = {}
    first: dict[tuple[str, str, str], float] = {}
    for record in records:
        for kind, sentence in _sentences(record, first):
            group = kind, record.tag.path
            told.setdefault(group, (record.step, f"{sentence}, first at step {record.step}"))
            layers.setdefault(group, {})[record.index] = None
    found += [(step, text + _others([*layers[group]][1:])) for group, (step, text) in told.items()]
    return [sentence for _, sentence in sorted(found, key=lambda pair: pair[0])]


def _others(indices: Sequence[tuple[int, ...]]) -> str:
    """The layers of the same scan that a sentence holds for too."""
    if not indices:
        return ""
    if len(indices) > NAMED:
        return f"; so do {len(indices)} other layers of its scan"
    names = ", ".join("".join(f"[{number}]" for number in index) for index in sorted(indices))
    return f"; so do {names}" if len(indices) > 1 else f"; so does {names}"


def _of_numbers(name: str, own: Sequence[Scalar]) -> list[tuple[int, str]]:
    """Steps and sentences: where a number leaves its best, and where it is none."""
    found = []
    finite = [number for number in own if math.isfinite(number.value)]
    if finite:
        best = min(finite, key=lambda number: number.value)
        over = [n.step for n in finite if n.step > best.step and n.value > 3 * abs(best.value)]
        if over:
            found.append((over[0], f"{name} is three times its best from step {over[0]} on"))
    broken = next((number.step for number in own if not math.isfinite(number.value)), None)
    if broken is not None:
        found.append((broken, f"{name} is not finite from step {broken} on"))
    return found


def _sentences(record: Record, first: dict[tuple[str, str, str], float]) -> list[tuple[str, str]]:
    stats, tag = record.stats, record.tag
    what = f"{record.path}: the {tag.tensor} of {tag.product} ({tag.format})"
    found = []
    if stats.get("nonfinite_blocks", 0):
        found.append(("nonfinite", f"{what} has Inf or NaN in {stats['nonfinite_blocks']} blocks"))
    share = stats.get("saturation", 0)
    usual = first.setdefault((record.path, str(tag), "saturation"), share)
    if share > SATURATED or share > max(MORE_SATURATED, GROWN * usual):
        found.append(("saturation", f"{what} saturates in {stats['saturation']:.1%} of its values"))
    if stats.get("underflow", 0) > UNDERFLOWN:
        found.append(("underflow", f"{what} loses {stats['underflow']:.0%} of its values to zero"))
    ratio = stats.get("outlier_ratio", 0)
    if math.isfinite(ratio) and ratio > OUTLYING:
        channel = stats["channels"][0][0]
        found.append(
            ("channel", f"{what} has an outlier: channel {channel} is {ratio:.0f} times the median")
        )
    sqnr = stats.get("sqnr_db", math.nan)
    if math.isfinite(sqnr):
        before = first.setdefault((record.path, tag.product, tag.tensor), sqnr)
        if before - sqnr > LOST_DB:
            found.append(
                ("sqnr", f"{what} lost {before - sqnr:.0f} dB of SQNR since its first step")
            )
    return found
