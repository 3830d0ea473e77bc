"""Pages of reports, filled into `report_page.html`: one file, light and dark, nothing fetched.

A page is sections of blocks: a `str` is a note, and the classes here are all others. The template
draws them by their `kind`, and escapes all texts.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

# Exponents of scales that say nothing of how large values are.
_ENDS = {-127: "at 2^-127, as zeros are", 128: "with NaN"}
# Of the bars of a histogram, in pixels.
_BAR, _BAR_HEIGHT, _WIDEST = 10, 36, 400
# Tells twelve lines apart on light pages and on dark ones; neighbours are far from each other.
_COLORS = [f"hsl({(210 + 150 * number) % 360}, 60%, 50%)" for number in range(12)]


def page(title: str, lead: str, sections: Mapping[str, Sequence[Any]]) -> str:
    """A page as text: a title, a line below it, and blocks by headings."""
    return _template().render(title=title, lead=lead, sections=sections).lstrip()


@functools.cache
def _template() -> Any:
    import jinja2  # only those who write a page wait for it

    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


@dataclasses.dataclass(frozen=True)
class Sentences:
    """A numbered list."""

    kind: ClassVar = "sentences"
    sentences: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Bad:
    """A text that is out of the ordinary: a block or a cell."""

    kind: ClassVar = "bad"
    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: cells are texts, `Bad`, `Share` or `Histogram`; so many columns are aligned to the
    left, and narrow ones are no wider than they must be."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 2
    narrow: bool = False


@dataclasses.dataclass(frozen=True)
class Share:
    """A cell of a map, darker where a share is larger: 0 to 1, on a scale of roots. The per cents
    are in it, or only beneath the pointer."""

    kind: ClassVar = "share"
    value: float
    numbers: bool = True

    @property
    def depth(self) -> float:
        """Of the color."""
        return math.sqrt(min(max(self.value, 0), 1)) if math.isfinite(self.value) else 1

    @property
    def text(self) -> str:
        """Two digits, as `0.25`, `8.1`, `42` and `100`."""
        number = 100 * self.value
        return "" if not self.numbers else f"{number:.2g}" if number < 10 else f"{number:.0f}"


class Histogram:
    """A cell: bars from the smallest power of two to the largest, and in words what is no power of
    two: blocks of zeros, which have the least scale, and blocks with NaN."""

    kind: ClassVar = "histogram"

    def __init__(self, counts: Mapping[int, int]):
        own = sorted(counts.items())
        inside = [(e, n) for e, n in own if e not in _ENDS]
        self.ends = ", ".join(f"{n} {_ENDS[e]}" for e, n in own if e in _ENDS)
        self.bars: list[dict[str, Any]] = []
        if inside:
            first, span = inside[0][0], inside[-1][0] - inside[0][0] + 1
            most = max(n for _, n in inside)
            self.step = min(_BAR, max(2, _WIDEST // span))
            self.width = max(span * self.step, 70)
            for e, n in inside:
                height = max(1.0, n / most * _BAR_HEIGHT)
                bar = {"exponent": e, "count": n, "x": (e - first) * self.step, "height": height}
                self.bars.append(bar)


class Lines:
    """Lines over steps, with what each is called below; what is not finite is a gap.

    The axis is logarithmic where all values are positive and the largest is over 100 times the
    smallest.
    """

    kind: ClassVar = "lines"
    WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 234, 64, 712, 22, 210

    def __init__(
        self, series: Mapping[str, Sequence[tuple[int, float]]], unit: str, along: str = "step"
    ):
        self.unit, self.along = unit, along
        self.named = list(series) != [unit]
        self.drawn: list[tuple[str, str, list[Any]]] = []
        points = [point for own in series.values() for point in own if math.isfinite(point[1])]
        if not points:
            return
        self.first, self.last = min(step for step, _ in points), max(step for step, _ in points)
        low, high = min(value for _, value in points), max(value for _, value in points)
        self._logarithmic = low > 0 and high > 100 * low
        if low == high:
            # One value has an axis around it, in its own size.
            around = abs(low) / 2 or 1.0
            low, high = low - around, high + around
        self._low, self._high = self._scaled(low), self._scaled(high)
        self.drawn = [
            (name, _COLORS[number % len(_COLORS)], self._runs(own))
            for number, (name, own) in enumerate(series.items())
        ]

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Five lines across, with their values."""
        found = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            value = self._high + share * (self._low - self._high)
            y = self.TOP + share * (self.BOTTOM - self.TOP)
            found.append((y, 10.0**value if self._logarithmic else value))
        return found

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._logarithmic else value

    def _runs(self, points: Sequence[tuple[int, float]]) -> list[list[Any]]:
        """Points in a row that are finite: places, step and value."""
        runs: list[list[Any]] = [[]]
        for step, value in points:
            if math.isfinite(value):
                right = (step - self.first) / max(self.last - self.first, 1)
                down = (self._high - self._scaled(value)) / (self._high - self._low)
                x = self.LEFT + right * (self.RIGHT - self.LEFT)
                y = self.TOP + down * (self.BOTTOM - self.TOP)
                runs[-1].append((x, y, step, value))
            else:
                runs.append([])
        return [run for run in runs if run]
