"""Survivors that somebody has looked at: why no test finds them."""

from typing import NamedTuple


class Explanation(NamedTuple):
    """Why a mutant survives.

    Attributes:
      equivalent: whether it gives the same for every input, so that no test can find it.
      why: in one line.
    """

    equivalent: bool
    why: str


def same(why: str) -> Explanation:
    """Equivalent: the same bits for every input."""
    return Explanation(True, why)


def accepted(why: str) -> Explanation:
    """Another behaviour that no test is worth its time for."""
    return Explanation(False, why)


# By module, and the changed line before and after.
EXPLAINED: dict[tuple[str, str, str], Explanation] = {}
