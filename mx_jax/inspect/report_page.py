"""Pages of reports, filled into `report_page.html`: one file, light and dark, nothing fetched.

A page is sections of blocks: a `str` is a note, a list is numbered, the rest are the classes here,
which the template draws by their names; it escapes all texts.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, Sequence[tuple[int, float]]]

# Lines, rows and columns that a reader can tell apart.
LINES, ROWS, COLUMNS = 12, 30, 12
# Exponents of scales that say nothing of how large values are.
_ENDS = {-127: "at 2^-127, as zeros are", 128: "with NaN"}
# Of the bars of a histogram, in pixels.
_BAR, _BAR_HEIGHT, _WIDEST = 10, 36, 400


def page(title: str, lead: str, sections: Mapping[str, Sequence[Any]]) -> str:
    """A page as text: a title, a line below it, and blocks by headings."""
    return _template().render(title=title, lead=lead, sections=sections).lstrip()


@functools.cache
def _template() -> Any:
    import jinja2  # only those who write a page wait for it

    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


class Bad(str):
    """A text that is out of the ordinary: a block or a cell."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts, `Bad`, `Share` or `Histogram`; `left` columns are aligned to the left."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 2
    narrow: bool = False


@dataclasses.dataclass(frozen=True)
class Share:
    """A cell of a map, darker where a share is larger: 0 to 1, on a scale of roots."""

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


def share_map(
    head: str, shares: Mapping[str, Mapping[int, float]], columns: Mapping[int, str], numbers: bool
) -> Table:
    """Shares by name and column, those names first that have most."""
    ranked = sorted(shares, key=lambda name: -max(shares[name].values()))[:ROWS]
    rows = [
        (name, *(Share(own[at], numbers) if at in own else "" for at in columns))
        for name in ranked
        for own in (shares[name],)
    ]
    return Table((head, *columns.values()), rows, left=1, narrow=not numbers)


class Histogram:
    """A cell: bars by powers of two, and in words blocks of zeros, or with NaN, that have none."""

    def __init__(self, counts: Mapping[int, int]):
        inside = {e: n for e, n in sorted(counts.items()) if e not in _ENDS}
        self.ends = ", ".join(f"{counts[e]} {text}" for e, text in _ENDS.items() if e in counts)
        self.bars: list[dict[str, Any]] = []
        if inside:
            first, span = min(inside), max(inside) - min(inside) + 1
            most = max(inside.values())
            self.step = min(_BAR, max(2, _WIDEST // span))
            self.width = max(span * self.step, 70)
            for e, n in inside.items():
                height = max(1.0, n / most * _BAR_HEIGHT)
                bar = {"exponent": e, "count": n, "x": (e - first) * self.step, "height": height}
                self.bars.append(bar)


class Lines:
    """Lines over steps, with what each is called below; what is not finite is a gap."""

    # The axis is logarithmic where all are positive, and the largest over 100 times the smallest.

    WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 234, 64, 712, 22, 210

    def __init__(self, series: Series, unit: str, along: str = "step"):
        self.unit, self.along, self.named = unit, along, list(series) != [unit]
        self.drawn: list[tuple[str, str, list[Any]]] = []
        points = [point for own in series.values() for point in own if math.isfinite(point[1])]
        if not points:
            return
        steps, values = zip(*points, strict=True)
        self.first, self.last, low, high = min(steps), max(steps), min(values), max(values)
        logarithmic = low > 0 and high > 100 * low
        if low == high:
            # One value has an axis around it, in its own size.
            around = abs(low) / 2 or 1.0
            low, high = low - around, high + around
        scaled = math.log10 if logarithmic else float
        bottom, top = scaled(low), scaled(high)

        def placed(step: int, value: float) -> tuple[float, float, int, float]:
            right = (step - self.first) / max(self.last - self.first, 1)
            down = (top - scaled(value)) / (top - bottom)
            x = self.LEFT + right * (self.RIGHT - self.LEFT)
            return x, self.TOP + down * (self.BOTTOM - self.TOP), step, value

        # Five lines across, with their values.
        self.ticks = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            value = top + share * (bottom - top)
            y = self.TOP + share * (self.BOTTOM - self.TOP)
            self.ticks.append((y, 10.0**value if logarithmic else value))
        for number, (name, own) in enumerate(series.items()):
            # Tells twelve lines apart on light pages and on dark ones: neighbours' hues are far.
            color = f"hsl({(210 + 150 * number) % 360}, 60%, 50%)"
            runs = itertools.groupby(own, key=lambda point: math.isfinite(point[1]))
            drawn = [[placed(*point) for point in run] for finite, run in runs if finite]
            self.drawn.append((name, color, drawn))


def worst_lines(series: Series, unit: str, along: str = "step", sign: int = 1) -> Lines:
    """The lines that are worst at their worst; the sign is 1 if low is bad, -1 if high is."""

    def worst(name: str) -> float:
        return min((sign * v for _, v in series[name] if math.isfinite(v)), default=math.inf)

    shown = sorted(series, key=worst)[:LINES]
    return Lines({name: series[name] for name in shown}, unit, along)
