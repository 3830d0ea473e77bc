"""Rounding to a format by exact rational arithmetic and a table of its values.

Shares nothing with `mx_jax.codecs`: no bit patterns, no shifts, no floats on the way.
"""

import bisect
import functools
from fractions import Fraction

from mx_jax.formats import ElementFormat


@functools.cache
def magnitudes(element: ElementFormat) -> list[Fraction]:
    """Values of the codes 0, 1, 2, ... up to the largest finite one."""
    return [Fraction(element.value(code)) for code in range(element.max_code + 1)]


def encode(
    x: float,
    element: ElementFormat,
    rounding: str,
    *,
    exponent: int = 0,
    random: tuple[int, int] = (0, 0),
) -> int:
    """The code of a finite `x / 2^exponent`, saturated.

    Args:
      x: a finite float; its sign counts even if it is zero.
      element: the element format.
      rounding: `"nearest"`, `"away"`, `"toward_zero"` or `"stochastic"`.
      exponent: of the power of two to divide by.
      random: (r, n) for stochastic rounding: the n-bit integer r.
    """
    magnitude = abs(Fraction(x)) / Fraction(2) ** exponent
    negative = str(x).startswith("-")
    half = _round(magnitude, element, rounding, random)
    if half > element.max_code:
        half = element.max_code + (element.negative_extra and negative)
    if not negative or (half == 0 and not element.has_negative_zero):
        return half
    return (1 << element.bits) - half if element.kind == "int" else half + element.sign_code


def _round(
    magnitude: Fraction, element: ElementFormat, rounding: str, random: tuple[int, int]
) -> int:
    """Index of the value that a magnitude is rounded to; one too many above the range."""
    table = magnitudes(element)
    below = bisect.bisect_right(table, magnitude) - 1
    # Above the largest value the grid goes on in its last step, until the next one would be out.
    step = table[below + 1] - table[below] if below < element.max_code else table[-1] - table[-2]
    fraction = (magnitude - table[below]) / step
    if fraction >= 1:
        return below + 1
    half = Fraction(1, 2)
    r, n = random
    up = {
        "nearest": fraction > half or (fraction == half and below % 2 == 1),
        "away": fraction >= half,
        "toward_zero": False,
        "stochastic": int(fraction * 2**n) + r >= 2**n,
    }[rounding]
    return below + up
