"""How far the mean over a few seeds may be from the mean over all: Student's 95 % interval."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """The mean of `n` values, and half the width of its 95 % interval.

    Of paired differences (the same seed, the same data) it says what a choice brings: where the
    interval contains 0, the seeds cannot tell.

    Attributes:
      mean: of the values.
      half_width: `t(0.975, n - 1) · s / sqrt(n)`, where `s` is the standard deviation of the values
        with n - 1; None of a single value.
      n: number of values.
    """

    mean: float
    half_width: float | None
    n: int

    @property
    def tells(self) -> bool:
        """Whether 0 lies outside."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def text(self, pattern: str) -> str:
        """`mean ± half width`, or the mean alone of a single value."""
        mean = format(self.mean, pattern)
        if self.half_width is None:
            return mean
        return f"{mean} ± {format(self.half_width, pattern.replace('+', ''))}"


def interval(values: Sequence[float]) -> Interval | None:
    """The interval of a mean; None of no values."""
    n = len(values)
    if n < 2:
        return Interval(values[0], None, n) if n else None
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Interval(statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(n), n)


def text(values: Sequence[float], pattern: str) -> str:
    """`mean ± half width` of values; a dash of none."""
    estimate = interval(values)
    return "-" if estimate is None else estimate.text(pattern)
