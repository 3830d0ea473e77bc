"""Size of a mean vector from a few noisy draws of it, without what the noise adds.

Of n independent draws e_i of a vector with mean b, the squared length of their mean is too large:

    E |mean_i e_i|^2 = |b|^2 + tr Cov(e) / n

so without any bias it is still `noise / sqrt(n)`. Products of different draws have no such term,
since draws are independent: `E e_i . e_j = |b|^2` for i != j. So

    |b|^2 ~ sum_{i != j} e_i . e_j / (n (n - 1)) = |mean_i e_i|^2 - s^2 / n

is right on average (s^2: the variance of the draws, with n - 1), and so is the mean of products of
the draws of two vectors. All that is needed are the inner products of draws, and those of parts of
a vector add up to those of the whole. Source: U-statistics, Hoeffding 1948.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InnerProducts:
    """Inner products of n draws of an exact vector g and of its error e, float64 `[n, n]`.

    Attributes:
      exact: `g_i . g_j`.
      error: `e_i . e_j`.
      mixed: `e_i . g_j`.
    """

    exact: np.ndarray
    error: np.ndarray
    mixed: np.ndarray

    @classmethod
    def of(
        cls, exact: Sequence[Any] | np.ndarray, error: Sequence[Any] | np.ndarray
    ) -> "InnerProducts":
        """Of draws as arrays of one shape."""
        g, e = (
            np.stack([np.ravel(np.asarray(x, np.float64)) for x in own]) for own in (exact, error)
        )
        # Inf times 0 is no news: `estimate` looks at what comes of it.
        with np.errstate(invalid="ignore"):
            return cls(exact=g @ g.T, error=e @ e.T, mixed=e @ g.T)

    def __add__(self, other: "InnerProducts") -> "InnerProducts":
        """Those of two parts of a vector together."""
        return InnerProducts(
            exact=self.exact + other.exact,
            error=self.error + other.error,
            mixed=self.mixed + other.mixed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What n draws say of the bias of a vector.

    Attributes:
      bias: `|E e| / |E g|`, both without what noise adds; 0 where the noise explains all there is,
        NaN where the exact mean itself cannot be told from 0, or a draw is not finite.
      low: lower end of its confidence interval.
      high: upper end.
      uncorrected: `|mean e| / |mean g|`, as it is when nobody takes the noise out.
      slope: `E q . E g / |E g|^2` of `q = g + e`: below 1 the mean is too short.
      one: `sqrt(mean |e|^2 / mean |g|^2)`: relative error of a single draw; NaN where one is not
        finite.
      draws: n.
      signal: the exact mean over its own noise, from draw to draw. Below 2 shares of that mean say
        little.
    """

    bias: float
    low: float
    high: float
    uncorrected: float
    slope: float
    one: float
    draws: int
    signal: float = math.inf


def estimate(products: InnerProducts, confidence: float) -> Estimate:
    """Bias, with an interval from leaving out one draw after the other.

    The squared ratio `|E e|^2 / |E g|^2` is estimated, and its deviation by the jackknife with
    Student's quantile for n - 1 degrees of freedom; then the root is taken. Without a bias the
    jackknife's deviation is too large rather than too small, so the interval then holds 0 more
    often than it says.

    Args:
      products: of at least three draws.
      confidence: of the interval, 0 to 1.
    """
    from scipy.special import stdtrit  # takes longer to import than all of this module's work

    n = len(products.error)
    if not all(np.isfinite(own).all() for own in vars(products).values()):
        # `max(0.0, nan)` is 0: without this, what diverged would have no bias at all.
        nan = math.nan
        return Estimate(bias=nan, low=nan, high=nan, uncorrected=nan, slope=nan, one=nan, draws=n)
    error, exact = _squared_mean(products.error), _squared_mean(products.exact)
    uncorrected = math.sqrt(_ratio(float(products.error.sum()), float(products.exact.sum())))
    one = math.sqrt(_ratio(float(np.trace(products.error)), float(np.trace(products.exact))))
    if error.whole == 0 and not products.error.any():
        return Estimate(bias=0, low=0, high=0, uncorrected=0, slope=1, one=0, draws=n)
    # What is left of the spread of single draws in the mean of n.
    noise = max(0.0, float(np.trace(products.exact)) / n - exact.whole) / n
    signal = math.sqrt(_ratio(max(0.0, exact.whole), noise))
    known = functools.partial(Estimate, uncorrected=uncorrected, one=one, draws=n, signal=signal)
    if exact.whole <= 0 or (exact.without <= 0).any():
        nan = math.nan
        return known(bias=nan, low=nan, high=nan, slope=nan)
    ratio, ratios = error.whole / exact.whole, error.without / exact.without
    deviation = math.sqrt((n - 1) / n * float(np.sum((ratios - ratios.mean()) ** 2)))
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation
    bias, low, high = (math.sqrt(max(0.0, x)) for x in (ratio, ratio - half, ratio + half))
    slope = 1 + _squared_mean(products.mixed).whole / exact.whole
    return known(bias=bias, low=low, high=high, slope=slope)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _SquaredMean:
    """The estimate from all draws, and those that leave out one, `[n]`."""

    whole: float
    without: np.ndarray


def _squared_mean(products: np.ndarray) -> _SquaredMean:
    """Mean inner product of two different draws."""
    n, diagonal = len(products), np.diagonal(products)
    different = products.sum() - diagonal.sum()
    of_one = products.sum(0) + products.sum(1) - 2 * diagonal
    return _SquaredMean(
        whole=float(different) / (n * (n - 1)),
        without=(different - of_one) / ((n - 1) * (n - 2)),
    )


def _ratio(value: float, unit: float) -> float:
    """A quotient; 0 / 0 is 0: nothing is wrong with nothing."""
    if unit > 0:
        return value / unit
    return 0.0 if value == 0 else math.inf
