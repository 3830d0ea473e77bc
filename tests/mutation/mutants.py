"""Mutants of the numeric core: how they are named and drawn."""

import dataclasses
import difflib
import hashlib
import math
import random


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operator fits in a module, so one mutant.

    Attributes:
      module: dotted name.
      operator: name of the operator.
      occurrence: which of the places where the operator fits.
      line: number of the line.
    """

    module: str
    operator: str
    occurrence: int
    line: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed module: the lines before and after, and all of it."""

    place: Place
    before: str
    after: str
    source: str = dataclasses.field(repr=False)

    @property
    def id(self) -> str:
        """Other for each other source of the module: a session is resumed by it."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:16]
        return f"{self.place.module}:{digest}"


def draw(found: list[Place], share: float, seed: int) -> list[Place]:
    """That share of a module's places, each as likely as the others.

    A larger share draws the same ones and more.
    """
    order = list(found)
    random.Random(f"{seed}:{found[0].module if found else ''}").shuffle(order)
    return order[: math.ceil(share * len(order))]


def change(source: str, mutated: str) -> tuple[str, str]:
    """The changed lines before and after, each on one line."""
    old, new = source.splitlines(), mutated.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
        if tag != "equal":
            return _join(old[i1:i2]), _join(new[j1:j2])
    raise AssertionError("nothing changed")


def _join(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
