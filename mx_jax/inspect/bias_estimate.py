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


def inner_products(
    exact: Sequence[Any] | np.ndarray, error: Sequence[Any] | np.ndarray
) -> np.ndarray:
    """Inner products of n draws of an exact vector g and of its error e, as arrays of one shape.

    Returns:
      Float64 `[3, n, n]`: `g_i . g_j`, `e_i . e_j` and `e_i . g_j`. Those of parts of a vector add
      up to those of the whole.
    """
    g, e = (np.stack([np.ravel(np.asarray(x, np.float64)) for x in own]) for own in (exact, error))
    # Inf times 0 is no news: `estimate` looks at what comes of it.
    with np.errstate(invalid="ignore"):
        return np.stack([g @ g.T, e @ e.T, e @ g.T])


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


def estimate(products: np.ndarray, confidence: float) -> Estimate:
    """Bias, with an interval from leaving out one draw after the other.

    The squared ratio `|E e|^2 / |E g|^2` is estimated, and its deviation by the jackknife with
    Student's quantile for n - 1 degrees of freedom; then the root is taken. Without a bias the
    jackknife's deviation is too large rather than too small, so the interval then holds 0 more
    often than it says.

    Args:
      products: what `inner_products` gave, of at least three draws.
      confidence: of the interval, 0 to 1.
    """
    from scipy.special import stdtrit  # takes longer to import than all of this module's work

    n, nan = products.shape[-1], math.nan
    if not np.isfinite(products).all():
        # `max(0.0, nan)` is 0: without this, what diverged would have no bias at all.
        return Estimate(bias=nan, low=nan, high=nan, uncorrected=nan, slope=nan, one=nan, draws=n)
    of_exact, of_error, _ = products
    (exact, exacts), (error, errors), (mixed, _) = map(_squared_mean, products)
    uncorrected = math.sqrt(_ratio(float(of_error.sum()), float(of_exact.sum())))
    one = math.sqrt(_ratio(float(np.trace(of_error)), float(np.trace(of_exact))))
    if not of_error.any():
        return Estimate(bias=0, low=0, high=0, uncorrected=0, slope=1, one=0, draws=n)
    # What is left of the spread of single draws in the mean of n.
    noise = max(0.0, float(np.trace(of_exact)) / n - exact) / n
    signal = math.sqrt(_ratio(max(0.0, exact), noise))
    known = functools.partial(Estimate, uncorrected=uncorrected, one=one, draws=n, signal=signal)
    if exact <= 0 or (exacts <= 0).any():
        return known(bias=nan, low=nan, high=nan, slope=nan)
    ratio, ratios = error / exact, errors / exacts
    deviation = math.sqrt((n - 1) / n * float(np.sum((ratios - ratios.mean()) ** 2)))
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation
    bias, low, high = (math.sqrt(max(0.0, x)) for x in (ratio, ratio - half, ratio + half))
    return known(bias=bias, low=low, high=high, slope=1 + mixed / exact)


def _squared_mean(products: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean inner product of two different draws: of all, and with each one left out, `[n]`."""
    n, diagonal = len(products), np.diagonal(products)
    different = products.sum() - diagonal.sum()
    of_one = products.sum(0) + products.sum(1) - 2 * diagonal
    without = (different - of_one) / ((n - 1) * (n - 2))
    return float(different) / (n * (n - 1)), without


def _ratio(value: float, unit: float) -> float:
    """A quotient; 0 / 0 is 0: nothing is wrong with nothing."""
    if unit > 0:
        return value / unit
    return 0.0 if value == 0 else math.inf
